//! The process of a container: its arguments and its environment, from nothing but the pod.

use std::{collections::BTreeMap, io, net::SocketAddr};

use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use kube::ResourceExt as _;

use super::{
    image::ProductImage,
    rewrite::{Ports, Rewrite, expand},
    sources::{SourceRefs, Sources},
    start_error::StartError,
    volumes::{field, map_data, secret_data},
};

/// The search path of most images.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Arguments and environment of the process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProcessSpec {
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
}

/// Adds the objects from which variables take their values.
pub(super) fn needs(container: &Container, needs: &mut SourceRefs) {
    for source in container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
        needs.maps.extend(source.config_map_key_ref.iter().map(|key| key.name.clone()));
        needs.secrets.extend(source.secret_key_ref.iter().map(|key| key.name.clone()));
    }
}

/// Inputs of a [`ProcessSpec`].
pub(super) struct ProcessSpecBuilder<'a> {
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    pub(super) image: ProductImage,
    pub(super) sources: &'a Sources,
    pub(super) rewrite: &'a Rewrite,
    /// Address of the API server in the pod.
    pub(super) api: SocketAddr,
}

impl ProcessSpecBuilder<'_> {
    /// Arguments and environment.
    ///
    /// # Errors
    /// [`StartError`].
    pub(super) fn build(&self, ports: &mut Ports) -> Result<ProcessSpec, StartError> {
        let host = |error: io::Error| StartError::Host("find a free port", error);
        if self.container.env_from.as_ref().is_some_and(|from| !from.is_empty()) {
            return Err(StartError::Unsupported("envFrom".to_owned()));
        }
        let mut env = self.base();
        for variable in self.container.env.iter().flatten() {
            if let Some(value) = self.value(variable, &env)? {
                env.push((variable.name.clone(), value));
            }
        }
        let args = self.args()?.into_iter().map(|arg| self.rewrite.text(&expand(&arg, &env), ports));
        let args = args.collect::<Result<_, _>>().map_err(host)?;
        // The last variable of a name wins.
        let env: BTreeMap<_, _> = env.into_iter().collect();
        let mut env: BTreeMap<_, _> = env
            .into_iter()
            .map(|(name, value)| Ok((name, self.rewrite.text(&value, ports)?)))
            .collect::<io::Result<_>>()
            .map_err(host)?;
        for (name, port) in self.image.listeners {
            let port = ports.of(*port).map_err(host)?;
            env.entry((*name).to_owned()).or_insert_with(|| format!("127.0.0.1:{port}"));
        }
        Ok(ProcessSpec { args, env: env.into_iter().collect() })
    }

    /// Variables that a container runtime and a kubelet set in every container.
    fn base(&self) -> Vec<(String, String)> {
        let service = [
            ("KUBERNETES_SERVICE_HOST", self.api.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT", self.api.port().to_string()),
            ("KUBERNETES_SERVICE_PORT_HTTPS", self.api.port().to_string()),
        ];
        let image = [("PATH", PATH.to_owned()), ("HOME", "/".to_owned()), ("HOSTNAME", self.pod.name_any())];
        let defaults = self.image.env.iter().map(|(name, value)| (*name, (*value).to_owned()));
        image.into_iter().chain(defaults).chain(service).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// A command replaces the image's entrypoint, which is the binary.
    fn args(&self) -> Result<Vec<String>, StartError> {
        let command = self.container.command.as_deref().unwrap_or_default();
        let args = self.container.args.iter().flatten();
        match command.split_first() {
            Some((program, _)) if program.rsplit('/').next() != Some(self.image.binary) => {
                Err(StartError::Unsupported(format!("the command {program:?}")))
            }
            Some((_, more)) => Ok(more.iter().chain(args).cloned().collect()),
            None => Ok(args.cloned().collect()),
        }
    }

    fn value(&self, variable: &EnvVar, before: &[(String, String)]) -> Result<Option<String>, StartError> {
        let Some(source) = &variable.value_from else {
            return Ok(Some(expand(variable.value.as_deref().unwrap_or_default(), before)));
        };
        if let Some(reference) = &source.field_ref {
            return field(self.pod, &reference.field_path).map(Some);
        }
        let (kind, name, key, optional, data) = if let Some(reference) = &source.config_map_key_ref {
            let map = self.sources.maps.get(&reference.name).and_then(Option::as_ref);
            ("configmap", &reference.name, &reference.key, reference.optional, map.map(map_data))
        } else if let Some(reference) = &source.secret_key_ref {
            let secret = self.sources.secrets.get(&reference.name).and_then(Option::as_ref);
            ("secret", &reference.name, &reference.key, reference.optional, secret.map(secret_data))
        } else {
            return Err(StartError::Unsupported(format!("the source of the variable {}", variable.name)));
        };
        let found = match data {
            Some(mut data) => data.remove(key).ok_or_else(|| StartError::NoKey(kind, name.clone(), key.clone())),
            None => Err(StartError::NotFound(kind, name.clone())),
        };
        match found {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(_) if optional == Some(true) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;
    use crate::kubelet::image::Image;

    fn built(container: Value, ports: &mut Ports) -> Result<ProcessSpec, StartError> {
        built_of("tidewatch-agent", container, ports)
    }

    fn built_of(image: &str, container: Value, ports: &mut Ports) -> Result<ProcessSpec, StartError> {
        let mut whole = json!({"name": "server"});
        whole.as_object_mut().into_iter().zip(container.as_object()).for_each(|(all, more)| all.extend(more.clone()));
        let container: Container = from_value(whole).expect("a container");
        let pod = from_value(json!({"metadata": {"name": "p", "namespace": "n"}})).expect("a pod");
        let map = from_value(json!({"data": {"url": "https://127.0.0.1:9"}})).expect("a map");
        let sources = Sources { maps: [("settings".to_owned(), Some(map))].into(), ..Sources::default() };
        let rewrite = Rewrite { mounts: vec![("/etc/id".to_owned(), "/v".into())], known: vec![2113] };
        let Image::Product(image) = Image::of(image) else { panic!("it is ours") };
        let api = ([127, 0, 0, 1], 6443).into();
        ProcessSpecBuilder { pod: &pod, container: &container, image, sources: &sources, rewrite: &rewrite, api }
            .build(ports)
    }

    #[test]
    fn arguments_and_variables_come_from_the_pod() {
        let mut ports = Ports::default();
        let start = built(
            json!({
                "command": ["/bin/tidewatch-agent", "--a"], "args": ["--id=/etc/id/x", "--ns=$(NS)", "--url=$(URL)"],
                "env": [
                    {"name": "NS", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                    {"name": "URL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "url"}}},
                    {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "none", "optional": true}}},
                    {"name": "TIDEWATCH_ADMIN_ADDRESS", "value": "127.0.0.1:2113"},
                ],
            }),
            &mut ports,
        )
        .expect("built");
        assert_eq!(start.args, ["--a", "--id=/v/x", "--ns=n", "--url=https://127.0.0.1:9"]);
        let value = |name: &str| start.env.iter().find(|(is, _)| is == name).map(|(_, value)| value.as_str());
        assert_eq!(
            (value("KUBERNETES_SERVICE_HOST"), value("KUBERNETES_SERVICE_PORT")),
            (Some("127.0.0.1"), Some("6443"))
        );
        assert_eq!((value("HOSTNAME"), value("NONE")), (Some("p"), None));
        // Two agents on one machine do not collide: listeners without a flag get a free port too.
        let free = |port: u16| format!("127.0.0.1:{}", ports.assigned()[&port]);
        assert_eq!(value("TIDEWATCH_METRICS_ADDRESS"), Some(free(2112).as_str()));
        assert_eq!(value("TIDEWATCH_ADMIN_ADDRESS"), Some(free(2113).as_str()));
    }

    #[test]
    fn the_variables_of_an_image_give_way_to_those_of_the_pod() {
        let dir = |container: Value| {
            let start = built_of("sample-operator:1", container, &mut Ports::default()).expect("built");
            start.env.into_iter().find(|(name, _)| name == "SERVICE_ACCOUNT_DIR").map(|(_, value)| value)
        };
        assert_eq!(dir(json!({})).as_deref(), Some("/var/run/secrets/kubernetes.io/serviceaccount"));
        let own = json!({"env": [{"name": "SERVICE_ACCOUNT_DIR", "value": "/etc/id/account"}]});
        assert_eq!(dir(own).as_deref(), Some("/v/account"));
    }

    #[test]
    fn missing_and_unsupported_sources_are_refused() {
        let from = |name: &str, key: &str| json!({"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}]});
        let refused = |container| built(container, &mut Ports::default()).expect_err("refused");
        assert!(matches!(refused(from("none", "url")), StartError::NotFound("configmap", _)));
        assert!(matches!(refused(from("settings", "none")), StartError::NoKey("configmap", ..)));
        assert!(matches!(refused(json!({"command": ["/bin/sh"]})), StartError::Unsupported(_)));
        assert!(matches!(
            refused(json!({"envFrom": [{"configMapRef": {"name": "settings"}}]})),
            StartError::Unsupported(_)
        ));
    }
}
