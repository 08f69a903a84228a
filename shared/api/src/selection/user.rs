//! What the user selects in the Kyma of a runtime cluster.

use std::collections::HashSet;

use kube::ResourceExt as _;
use serde::de::Error as _;
use serde_json::Value;

use super::Pins;
use crate::{Kyma, KymaSpec, names::annotation};

/// Member of the accepted spec that has the pins; the spec of a Kyma has no such member.
const PINS: &str = "pins";

/// Spec and pins of the Kyma in a runtime cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UserSelection {
    /// Spec of the Kyma.
    pub spec: KymaSpec,
    /// Pins of the Kyma.
    pub pins: Pins,
}

impl UserSelection {
    /// Selection of the Kyma in a runtime cluster.
    pub fn of(runtime: &Kyma) -> Self {
        let mut spec = runtime.spec.clone();
        spec.other.remove(PINS);
        // A runtime cluster may return more modules and annotations than a valid Kyma can have.
        let listed: HashSet<_> = spec.modules().iter().map(|entry| entry.name.as_str()).collect();
        let pins = Pins::of(runtime.annotations(), |module| listed.contains(module));
        Self { spec, pins }
    }

    /// Selection by the spec of a Kyma in KCP.
    pub fn of_spec(kcp: &Kyma) -> Self {
        Self { spec: kcp.spec.clone(), pins: Pins::default() }
    }

    /// Last accepted selection of a user, which a Kyma in KCP records; `None` if none is recorded, an error if the record is
    /// malformed.
    pub fn accepted(kcp: &Kyma) -> Option<serde_json::Result<Self>> {
        kcp.annotations().get(annotation::ACCEPTED_SPEC).map(|text| Self::parse(text))
    }

    /// Parses the value of the annotation `tidewatch-accepted-spec`.
    ///
    /// # Errors
    /// If the text is no spec of a Kyma with pins, in JSON.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        let mut selection: Value = serde_json::from_str(text)?;
        let members = selection.as_object_mut().ok_or_else(|| serde_json::Error::custom("not an object"))?;
        let pins = members.remove(PINS).map(serde_json::from_value).transpose()?;
        Ok(Self { spec: serde_json::from_value(selection)?, pins: pins.unwrap_or_default() })
    }

    /// Value of the annotation, in JSON.
    pub fn to_json(&self) -> Value {
        let mut selection = serde_json::to_value(&self.spec).unwrap_or_default();
        if !self.pins.is_empty() {
            selection[PINS] = serde_json::to_value(&self.pins).unwrap_or_default();
        }
        selection
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selection_is_recorded_with_its_pins() {
        let kyma = |spec: Value, annotations: Value| -> Kyma {
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "default", "annotations": annotations}, "spec": spec}))
            .unwrap()
        };
        let spec = json!({"channel": "fast", "modules": [{"name": "keda", "managed": true}], "future": 1});
        let plain = UserSelection::of(&kyma(spec.clone(), json!({"version": "1.0.0"})));
        assert_eq!(plain.to_json(), spec, "without a pin it is the spec");
        let pin = json!({"version.operator.kyma-project.io/keda": "1.0.0"});
        let pinned = UserSelection::of(&kyma(spec.clone(), pin));
        let mut expected = spec.clone();
        expected["pins"] = json!({"keda": "1.0.0"});
        assert_eq!(pinned.to_json(), expected);
        for selection in [plain, pinned] {
            assert_eq!(UserSelection::parse(&selection.to_json().to_string()).unwrap(), selection);
        }
        // A member of this name in the spec of a Kyma is no pin.
        let of_spec = UserSelection::of(&kyma(expected, Value::Null));
        assert_eq!((of_spec.to_json(), of_spec.pins.is_empty()), (spec, true));
        for malformed in ["", "[]", "{}", r#"{"channel": "fast", "pins": ["keda"]}"#] {
            assert!(UserSelection::parse(malformed).is_err(), "{malformed}");
        }
    }
}
