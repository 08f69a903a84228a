//! The files of a pod's volumes, from their sources.

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret, Volume, VolumeProjection},
};
use kube::ResourceExt as _;

use super::{
    layout::{Content, Files, is_safe},
    sources::{SourceRefs, Sources, TokenNeed},
    start_error::StartError,
};

/// Permissions of files, if the volume sets none.
const DEFAULT_MODE: i32 = 0o644;
/// Lifetime of a token in seconds, if the volume sets none.
const DEFAULT_TOKEN_SECONDS: i64 = 3_600;

/// Content of a volume.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum VolumeContent {
    /// The container's own, empty at first.
    Empty,
    /// Kept equal to its sources.
    Files(Files),
}

/// Adds the objects that are sources of a volume.
pub(super) fn needs(volume: &Volume, needs: &mut SourceRefs) {
    if let Some(map) = &volume.config_map {
        needs.maps.insert(map.name.clone());
    }
    if let Some(secret) = &volume.secret {
        needs.secrets.insert(secret.secret_name.clone().unwrap_or_default());
    }
    for source in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
        needs.maps.extend(source.config_map.iter().map(|map| map.name.clone()));
        needs.secrets.extend(source.secret.iter().map(|secret| secret.name.clone()));
        needs.tokens.extend(source.service_account_token.iter().map(token_need));
    }
}

fn token_need(token: &k8s_openapi::api::core::v1::ServiceAccountTokenProjection) -> TokenNeed {
    let audience = token.audience.clone().filter(|audience| !audience.is_empty());
    (audience, token.expiration_seconds.unwrap_or(DEFAULT_TOKEN_SECONDS))
}

/// Content of a volume by its sources.
///
/// # Errors
/// [`StartError`]: a source is missing, or the kind of volume is not supported.
pub(super) fn fill(volume: &Volume, pod: &Pod, sources: &Sources) -> Result<VolumeContent, StartError> {
    let mut builder = VolumeBuilder { sources, pod, mode: DEFAULT_MODE, files: Files::new() };
    if volume.empty_dir.is_some() {
        return Ok(VolumeContent::Empty);
    } else if let Some(map) = &volume.config_map {
        builder.mode = map.default_mode.unwrap_or(DEFAULT_MODE);
        builder.map(&map.name, map.items.as_deref(), map.optional)?;
    } else if let Some(secret) = &volume.secret {
        builder.mode = secret.default_mode.unwrap_or(DEFAULT_MODE);
        builder.secret(secret.secret_name.as_deref().unwrap_or_default(), secret.items.as_deref(), secret.optional)?;
    } else if let Some(downward) = &volume.downward_api {
        builder.mode = downward.default_mode.unwrap_or(DEFAULT_MODE);
        builder.downward(downward.items.as_deref())?;
    } else if let Some(projected) = &volume.projected {
        builder.mode = projected.default_mode.unwrap_or(DEFAULT_MODE);
        projected.sources.iter().flatten().try_for_each(|source| builder.source(source))?;
    } else {
        return Err(StartError::Unsupported(format!("the kind of volume {:?}", volume.name)));
    }
    Ok(VolumeContent::Files(builder.files))
}

struct VolumeBuilder<'a> {
    sources: &'a Sources,
    pod: &'a Pod,
    mode: i32,
    files: Files,
}

impl VolumeBuilder<'_> {
    fn source(&mut self, source: &VolumeProjection) -> Result<(), StartError> {
        if let Some(map) = &source.config_map {
            self.map(&map.name, map.items.as_deref(), map.optional)
        } else if let Some(secret) = &source.secret {
            self.secret(&secret.name, secret.items.as_deref(), secret.optional)
        } else if let Some(downward) = &source.downward_api {
            self.downward(downward.items.as_deref())
        } else if let Some(token) = &source.service_account_token {
            let found = self.sources.tokens.get(&token_need(token));
            let token_text = found.ok_or_else(|| StartError::NotFound("token", token.path.clone()))?;
            self.put(&token.path, token_text.as_bytes().to_vec(), None)
        } else {
            Err(StartError::Unsupported("a source of a projected volume".to_owned()))
        }
    }

    fn map(&mut self, name: &str, items: Option<&[KeyToPath]>, optional: Option<bool>) -> Result<(), StartError> {
        let found = self.sources.maps.get(name).and_then(Option::as_ref).map(map_data);
        self.keys("configmap", name, found, items, optional)
    }

    fn secret(&mut self, name: &str, items: Option<&[KeyToPath]>, optional: Option<bool>) -> Result<(), StartError> {
        let found = self.sources.secrets.get(name).and_then(Option::as_ref).map(secret_data);
        self.keys("secret", name, found, items, optional)
    }

    fn keys(
        &mut self,
        kind: &'static str,
        name: &str,
        found: Option<BTreeMap<String, Vec<u8>>>,
        items: Option<&[KeyToPath]>,
        optional: Option<bool>,
    ) -> Result<(), StartError> {
        let Some(mut data) = found else {
            let missing = || StartError::NotFound(kind, name.to_owned());
            return if optional == Some(true) { Ok(()) } else { Err(missing()) };
        };
        let Some(items) = items else {
            return data.into_iter().try_for_each(|(key, bytes)| self.put(&key, bytes, None));
        };
        for item in items {
            match data.remove(&item.key) {
                Some(bytes) => self.put(&item.path, bytes, item.mode)?,
                None if optional == Some(true) => {}
                None => return Err(StartError::NoKey(kind, name.to_owned(), item.key.clone())),
            }
        }
        Ok(())
    }

    fn downward(&mut self, items: Option<&[DownwardAPIVolumeFile]>) -> Result<(), StartError> {
        for item in items.unwrap_or_default() {
            let reference = item.field_ref.as_ref();
            let path = reference.ok_or_else(|| StartError::Unsupported(format!("the source of {:?}", item.path)))?;
            self.put(&item.path, field(self.pod, &path.field_path)?.into_bytes(), item.mode)?;
        }
        Ok(())
    }

    fn put(&mut self, path: &str, bytes: Vec<u8>, mode: Option<i32>) -> Result<(), StartError> {
        if !is_safe(path) {
            return Err(StartError::Path(path.to_owned()));
        }
        let mode = u32::try_from(mode.unwrap_or(self.mode)).unwrap_or(0o600) & 0o777;
        self.files.insert(path.to_owned(), Content { bytes, mode });
        Ok(())
    }
}

/// Keys and bytes of a ConfigMap.
pub(super) fn map_data(map: &ConfigMap) -> BTreeMap<String, Vec<u8>> {
    let text = map.data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes()));
    text.chain(binary(map.binary_data.as_ref())).collect()
}

/// Keys and bytes of a Secret.
pub(super) fn secret_data(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    binary(secret.data.as_ref()).collect()
}

fn binary(data: Option<&BTreeMap<String, ByteString>>) -> impl Iterator<Item = (String, Vec<u8>)> + '_ {
    data.into_iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone()))
}

/// Value of a pod's field, as in `fieldRef`.
///
/// # Errors
/// [`StartError::Unsupported`].
pub(super) fn field(pod: &Pod, path: &str) -> Result<String, StartError> {
    let spec = pod.spec.as_ref();
    let inner = |of: &str| path.strip_prefix(of)?.strip_prefix("['")?.strip_suffix("']");
    let of = |map: &BTreeMap<String, String>, key: &str| map.get(key).cloned().unwrap_or_default();
    let lines = |map: &BTreeMap<String, String>| {
        map.iter().map(|(key, value)| format!("{key}={value:?}\n")).collect::<String>()
    };
    Ok(match path {
        "metadata.name" => pod.name_any(),
        "metadata.namespace" => pod.namespace().unwrap_or_default(),
        "metadata.uid" => pod.uid().unwrap_or_default(),
        "metadata.labels" => lines(pod.labels()),
        "metadata.annotations" => lines(pod.annotations()),
        "spec.nodeName" => super::NODE.to_owned(),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.podIP" | "status.podIPs" | "status.hostIP" => "127.0.0.1".to_owned(),
        _ => match (inner("metadata.labels"), inner("metadata.annotations")) {
            (Some(key), _) => of(pod.labels(), key),
            (_, Some(key)) => of(pod.annotations(), key),
            (None, None) => return Err(StartError::Unsupported(format!("the field {path}"))),
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod() -> Pod {
        let labels = json!({"app": "a", "tier": "b"});
        from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": labels}})).expect("a pod")
    }

    fn sources() -> Sources {
        let map = from_value(json!({"data": {"ca.crt": "roots", "other": "x"}})).expect("a map");
        let secret = from_value(json!({"data": {"key": "c2VjcmV0"}})).expect("a secret");
        Sources {
            maps: [("map".to_owned(), Some(map)), ("gone".to_owned(), None)].into(),
            secrets: [("secret".to_owned(), Some(secret)), ("gone".to_owned(), None)].into(),
            tokens: [((Some("tidewatch".to_owned()), 600), "token".to_owned())].into(),
        }
    }

    fn filled(volume: Value) -> Result<Vec<(String, String, u32)>, String> {
        let volume = from_value(volume).expect("a volume");
        match fill(&volume, &pod(), &sources()).map_err(|error| error.to_string())? {
            VolumeContent::Empty => Ok(Vec::new()),
            VolumeContent::Files(files) => Ok(files
                .into_iter()
                .map(|(path, content)| (path, String::from_utf8(content.bytes).expect("text"), content.mode))
                .collect()),
        }
    }

    #[test]
    fn a_projected_volume_holds_all_of_its_sources() {
        let volume = json!({"name": "v", "projected": {"defaultMode": 0o440, "sources": [
            {"serviceAccountToken": {"path": "token", "audience": "tidewatch", "expirationSeconds": 600}},
            {"configMap": {"name": "map", "items": [{"key": "ca.crt", "path": "deep/ca.crt", "mode": 0o400}]}},
            {"configMap": {"name": "gone", "optional": true}},
            {"downwardAPI": {"items": [
                {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}},
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                {"path": "tier", "fieldRef": {"fieldPath": "metadata.labels['tier']"}},
            ]}},
        ]}});
        let mut needed = SourceRefs::default();
        needs(&from_value(volume.clone()).expect("a volume"), &mut needed);
        assert_eq!(needed.maps, ["map".to_owned(), "gone".to_owned()].into());
        assert_eq!(needed.tokens, [(Some("tidewatch".to_owned()), 600)].into());
        let file = |path: &str, text: &str, mode| (path.to_owned(), text.to_owned(), mode);
        let expected = vec![
            file("deep/ca.crt", "roots", 0o400),
            file("labels", "app=\"a\"\ntier=\"b\"\n", 0o440),
            file("namespace", "n", 0o440),
            file("tier", "b", 0o440),
            file("token", "token", 0o440),
        ];
        assert_eq!(filled(volume), Ok(expected));
    }

    #[test]
    fn missing_and_unsupported_sources_are_reported() {
        let secret = |name: &str| json!({"name": "v", "secret": {"secretName": name}});
        assert_eq!(filled(secret("secret")), Ok(vec![("key".to_owned(), "secret".to_owned(), 0o644)]));
        for (volume, part) in [
            (secret("gone"), "secret \"gone\" not found"),
            (
                json!({"name": "v", "configMap": {"name": "map", "items": [{"key": "no", "path": "no"}]}}),
                "no key \"no\"",
            ),
            (
                json!({"name": "v", "configMap": {"name": "map", "items": [{"key": "other", "path": "../x"}]}}),
                "not a path in a volume",
            ),
            (json!({"name": "v", "hostPath": {"path": "/"}}), "does not support the kind of volume"),
        ] {
            let error = filled(volume).expect_err("refused");
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(filled(json!({"name": "v", "emptyDir": {}})), Ok(Vec::new()));
    }
}
