//! The program of a container as it is started here: its arguments and its environment, from nothing but the pod.

use std::{collections::BTreeMap, io, net::SocketAddr};

use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use kube::ResourceExt as _;

use super::{
    given::{Given, Needs},
    image::Own,
    rewrite::{Ports, Rewrite, expand},
    unready::Unready,
    volumes::{field, map_data, secret_data},
};

/// The search path of most images.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What is started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
}

/// Adds the objects that variables are filled from.
pub(super) fn needs(container: &Container, needs: &mut Needs) {
    for source in container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
        needs.maps.extend(source.config_map_key_ref.iter().map(|key| key.name.clone()));
        needs.secrets.extend(source.secret_key_ref.iter().map(|key| key.name.clone()));
    }
}

/// What all of it is made from.
pub(super) struct Maker<'a> {
    pub(super) pod: &'a Pod,
    pub(super) container: &'a Container,
    pub(super) own: Own,
    pub(super) given: &'a Given,
    pub(super) rewrite: &'a Rewrite,
    /// Where the pod finds its API server.
    pub(super) api: SocketAddr,
}

impl Maker<'_> {
    /// Arguments and environment.
    ///
    /// # Errors
    /// [`Unready`].
    pub(super) fn make(&self, ports: &mut Ports) -> Result<Start, Unready> {
        let host = |error: io::Error| Unready::Host("find a free port", error);
        if self.container.env_from.as_ref().is_some_and(|from| !from.is_empty()) {
            return Err(Unready::Unknown("envFrom".to_owned()));
        }
        let mut env = self.base();
        for variable in self.container.env.iter().flatten() {
            if let Some(value) = self.value(variable, &env)? {
                env.push((variable.name.clone(), value));
            }
        }
        let args = self.args()?.into_iter().map(|arg| self.rewrite.text(&expand(&arg, &env), ports));
        let args = args.collect::<Result<_, _>>().map_err(host)?;
        // The last one of a name counts.
        let env: BTreeMap<_, _> = env.into_iter().collect();
        let mut env: BTreeMap<_, _> = env
            .into_iter()
            .map(|(name, value)| Ok((name, self.rewrite.text(&value, ports)?)))
            .collect::<io::Result<_>>()
            .map_err(host)?;
        for (name, port) in self.own.listeners {
            let port = ports.of(*port).map_err(host)?;
            env.entry((*name).to_owned()).or_insert_with(|| format!("127.0.0.1:{port}"));
        }
        Ok(Start { args, env: env.into_iter().collect() })
    }

    /// What a container runtime and a kubelet give to every container.
    fn base(&self) -> Vec<(String, String)> {
        let service = [
            ("KUBERNETES_SERVICE_HOST", self.api.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT", self.api.port().to_string()),
            ("KUBERNETES_SERVICE_PORT_HTTPS", self.api.port().to_string()),
        ];
        let image = [("PATH", PATH.to_owned()), ("HOME", "/".to_owned()), ("HOSTNAME", self.pod.name_any())];
        image.into_iter().chain(service).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// A command replaces the image's entrypoint, which is the binary.
    fn args(&self) -> Result<Vec<String>, Unready> {
        let command = self.container.command.as_deref().unwrap_or_default();
        let args = self.container.args.iter().flatten();
        match command.split_first() {
            Some((program, _)) if program.rsplit('/').next() != Some(self.own.binary) => {
                Err(Unready::Unknown(format!("the command {program:?}")))
            }
            Some((_, more)) => Ok(more.iter().chain(args).cloned().collect()),
            None => Ok(args.cloned().collect()),
        }
    }

    fn value(&self, variable: &EnvVar, before: &[(String, String)]) -> Result<Option<String>, Unready> {
        let Some(source) = &variable.value_from else {
            return Ok(Some(expand(variable.value.as_deref().unwrap_or_default(), before)));
        };
        if let Some(reference) = &source.field_ref {
            return field(self.pod, &reference.field_path).map(Some);
        }
        let (kind, name, key, optional, data) = if let Some(reference) = &source.config_map_key_ref {
            let map = self.given.maps.get(&reference.name).and_then(Option::as_ref);
            ("configmap", &reference.name, &reference.key, reference.optional, map.map(map_data))
        } else if let Some(reference) = &source.secret_key_ref {
            let secret = self.given.secrets.get(&reference.name).and_then(Option::as_ref);
            ("secret", &reference.name, &reference.key, reference.optional, secret.map(secret_data))
        } else {
            return Err(Unready::Unknown(format!("the source of the variable {}", variable.name)));
        };
        let found = match data {
            Some(mut data) => data.remove(key).ok_or_else(|| Unready::NoKey(kind, name.clone(), key.clone())),
            None => Err(Unready::NotFound(kind, name.clone())),
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

    fn made(container: Value, ports: &mut Ports) -> Result<Start, Unready> {
        let mut whole = json!({"name": "server"});
        whole.as_object_mut().into_iter().zip(container.as_object()).for_each(|(all, more)| all.extend(more.clone()));
        let container: Container = from_value(whole).expect("a container");
        let pod = from_value(json!({"metadata": {"name": "p", "namespace": "n"}})).expect("a pod");
        let map = from_value(json!({"data": {"url": "https://127.0.0.1:9"}})).expect("a map");
        let given = Given { maps: [("settings".to_owned(), Some(map))].into(), ..Given::default() };
        let rewrite = Rewrite { mounts: vec![("/etc/id".to_owned(), "/v".into())], known: vec![2113] };
        let Image::Own(own) = Image::of("tidewatch-agent") else { panic!("it is ours") };
        let api = ([127, 0, 0, 1], 6443).into();
        Maker { pod: &pod, container: &container, own, given: &given, rewrite: &rewrite, api }.make(ports)
    }

    #[test]
    fn arguments_and_variables_are_the_pods() {
        let mut ports = Ports::default();
        let start = made(
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
        .expect("made");
        assert_eq!(start.args, ["--a", "--id=/v/x", "--ns=n", "--url=https://127.0.0.1:9"]);
        let value = |name: &str| start.env.iter().find(|(is, _)| is == name).map(|(_, value)| value.as_str());
        assert_eq!(
            (value("KUBERNETES_SERVICE_HOST"), value("KUBERNETES_SERVICE_PORT")),
            (Some("127.0.0.1"), Some("6443"))
        );
        assert_eq!((value("HOSTNAME"), value("NONE")), (Some("p"), None));
        // Two agents on one machine do not meet: what no flag names has a free port too.
        let free = |port: u16| format!("127.0.0.1:{}", ports.given()[&port]);
        assert_eq!(value("TIDEWATCH_METRICS_ADDRESS"), Some(free(2112).as_str()));
        assert_eq!(value("TIDEWATCH_ADMIN_ADDRESS"), Some(free(2113).as_str()));
    }

    #[test]
    fn what_is_missing_or_not_known_is_refused() {
        let from = |name: &str, key: &str| json!({"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}]});
        let refused = |container| made(container, &mut Ports::default()).expect_err("refused");
        assert!(matches!(refused(from("none", "url")), Unready::NotFound("configmap", _)));
        assert!(matches!(refused(from("settings", "none")), Unready::NoKey("configmap", ..)));
        assert!(matches!(refused(json!({"command": ["/bin/sh"]})), Unready::Unknown(_)));
        assert!(matches!(refused(json!({"envFrom": [{"configMapRef": {"name": "settings"}}]})), Unready::Unknown(_)));
    }
}
