use std::collections::BTreeMap;

use clap::{CommandFactory as _, Parser as _};
use tidewatch_receiver::config::Config;
use tidewatch_trust::IssuerName;

use super::*;

type Variables = BTreeMap<String, String>;

fn read(files: &[File], name: &str) -> Value {
    let file = files.iter().find(|file| file.name == format!("{name}.yaml")).unwrap();
    serde_saphyr::from_str(&file.content).unwrap()
}

/// The environment variables of the receiver's container in the files of one folder: from the ConfigMap of settings and
/// from the Deployment.
fn variables(files: &[File]) -> Variables {
    let settings = read(files, "settings");
    let deployment = read(files, "deployment");
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let data = settings["data"].as_object().unwrap().iter();
    let mut variables: Variables = data.map(|(name, value)| (name.clone(), text(value))).collect();
    for set in container["env"].as_array().into_iter().flatten() {
        let value = match set["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("metadata.namespace") => KCP_NAMESPACE.to_owned(),
            Some("metadata.name") => "tidewatch-receiver-7d9c-x2x4l".to_owned(),
            Some("status.podIP") => "2001:db8::7".to_owned(),
            Some("metadata.uid") => "a46a2b5c-9bd6-4ea5-9d1b-0c5f2f0f8d11".to_owned(),
            Some(other) => panic!("unexpected field {other}"),
            None => text(&set["value"]),
        };
        variables.insert(text(&set["name"]), value);
    }
    variables
}

/// Parses the receiver's configuration from environment variables.
fn receiver(variables: &Variables) -> Result<Config, String> {
    let command = Config::command();
    let mut line = vec![NAME.to_owned()];
    for (name, value) in variables {
        let argument =
            command.get_arguments().find(|argument| argument.get_env().is_some_and(|env| env == name.as_str()));
        let argument = argument.ok_or_else(|| format!("no flag reads {name}"))?;
        let flag = argument.get_long().ok_or_else(|| format!("{name} has no long flag"))?;
        match (argument.get_action().takes_values(), value.as_str()) {
            (true, value) => line.push(format!("--{flag}={value}")),
            (false, "true") => line.push(format!("--{flag}")),
            (false, other) => return Err(format!("{name} cannot be {other}")),
        }
    }
    Config::try_parse_from(line).map_err(|error| error.to_string())
}

/// The variables of the base, overridden by those of the overlay.
fn both() -> Variables {
    let mut variables = variables(&base().unwrap());
    variables.extend(self::variables(&cert_manager().unwrap()));
    variables
}

#[test]
fn the_receiver_accepts_the_settings_of_the_installation() {
    let container = &read(&base().unwrap(), "deployment")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(
        container["envFrom"],
        json!([{"configMapRef": {"name": read(&base().unwrap(), "settings")["metadata"]["name"]}}])
    );
    let config = receiver(&variables(&base().unwrap())).unwrap();
    assert_eq!(config.namespace, KCP_NAMESPACE);
    assert!(config.installer.settings(&config.trust_domain).is_some(), "agents are installed");
    assert_eq!(config.pki.issuer, IssuerName::Builtin);
    let config = receiver(&both()).unwrap();
    assert!(config.installer.settings(&config.trust_domain).is_some() && config.tls.tls_cert.is_some());
    let issuer_ref = read(&cert_manager().unwrap(), "certificate")["spec"]["issuerRef"].clone();
    let kind = issuer_ref["kind"].as_str().unwrap().to_owned();
    let name = issuer_ref["name"].as_str().unwrap().to_owned();
    assert_eq!(config.pki.issuer, IssuerName::CertManager { kind, name });
}

#[test]
fn the_ca_can_stand_in_a_namespace_of_its_own() {
    let base = base().unwrap();
    let overlay = ca_namespace().unwrap();
    let mut variables = variables(&base);
    variables.extend(
        read(&overlay, "settings")["data"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())),
    );
    let namespace = receiver(&variables).unwrap().pki.ca_namespace.unwrap();
    for name in ["casecret", "role", "rolebinding"] {
        assert_eq!(read(&overlay, name)["metadata"]["namespace"], namespace.as_str(), "{name}");
    }
    assert_eq!(read(&overlay, "rolebinding")["subjects"][0]["namespace"], KCP_NAMESPACE);
    for secret in [read(&overlay, "casecret"), read(&base, "casecret")] {
        assert!(secret.get("data").is_none(), "applying it again must not touch the content");
    }
}

/// The names of the Leases that the account may write.
fn written_leases(role: &Value) -> Vec<&str> {
    let rules = role["rules"].as_array().unwrap().iter();
    let writes =
        rules.filter(|rule| rule["resources"] == json!(["leases"]) && rule["verbs"] != json!(["list", "watch"]));
    writes.flat_map(|rule| rule["resourceNames"].as_array().unwrap()).map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn all_replicas_are_active_and_reach_each_other_alone() {
    let files = base().unwrap();
    let config = receiver(&variables(&files)).unwrap();
    let replica = config.replicas.settings().unwrap().relay.unwrap();
    assert_eq!((replica.address.port(), replica.advertise.to_string()), (RELAY, "2001:db8::7".to_owned()));
    assert_eq!((replica.name.as_str(), replica.files), ("tidewatch-receiver-7d9c-x2x4l", None));
    let deployment = read(&files, "deployment");
    let ports = deployment["spec"]["template"]["spec"]["containers"][0]["ports"].as_array().unwrap();
    assert!(ports.contains(&json!({"name": "relay", "containerPort": RELAY})), "{ports:?}");
    // Only its own pods reach the relay port, by whichever rule of the policy.
    let policy = read(&files, "networkpolicy");
    let rules = policy["spec"]["ingress"].as_array().unwrap().iter();
    let open = rules.filter(|rule| rule["ports"].as_array().unwrap().iter().any(|port| port["port"] == RELAY));
    let pods = json!([{"podSelector": policy["spec"]["podSelector"]}]);
    assert!(open.map(|rule| &rule["from"]).eq([&pods]), "{policy}");
    assert!(read(&files, "service")["spec"]["ports"].as_array().unwrap().iter().all(|port| port["port"] != RELAY));
}

#[test]
fn the_installation_contains_the_leases_that_the_receiver_may_write() {
    let files = base().unwrap();
    let file = files.iter().find(|file| file.name == "leases.yaml").unwrap();
    let documents = file.content.split("---\n").skip(1).map(|text| serde_saphyr::from_str(text).unwrap());
    let leases: Vec<Value> = documents.collect();
    let role = read(&files, "role");
    let names: Vec<_> = leases.iter().map(|lease| lease["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, written_leases(&role));
    for lease in &leases {
        let metadata = json!({"name": lease["metadata"]["name"], "namespace": KCP_NAMESPACE, "labels": labels()});
        let expected = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata});
        assert_eq!(*lease, expected, "applying it again must not change its holder");
    }
}

#[test]
fn a_sidecar_carries_the_requests_to_other_managers_alone() {
    let patch = read(&istio().unwrap(), "deployment");
    let pod = &patch["spec"]["template"];
    assert_eq!(pod["metadata"]["labels"], json!({"sidecar.istio.io/inject": "true"}));
    let traffic = |name: &str| pod["metadata"]["annotations"][format!("traffic.sidecar.istio.io/{name}")].as_str();
    assert_eq!((traffic("includeInboundPorts"), traffic("includeOutboundIPRanges")), (Some(""), Some("")));
    let carried: Vec<u16> =
        traffic("includeOutboundPorts").unwrap().split(',').map(|port| port.parse().unwrap()).collect();
    // Not those of API servers, registries and other replicas.
    assert!([443, 6443, RELAY].iter().all(|port| !carried.contains(port)), "{carried:?}");
    assert_eq!(carried, MANAGER_PORTS);
    assert!(pod["spec"].is_null(), "the pod stays as in the base");
}

/// As docs/operations/replicas.md describes it for one receiver.
#[test]
fn receiver_needs_no_relay_and_has_one_shard_then() {
    let mut variables = variables(&base().unwrap());
    variables.remove("TIDEWATCH_RELAY_ADDRESS").unwrap();
    let settings = receiver(&variables).unwrap().replicas.settings().unwrap();
    assert_eq!((settings.shards.get(), settings.relay), (1, None));
}

/// `acceptance.md` C1 33: the installation grants exactly so many rules, by one Role and its binding, and each overlay those of
/// one more. None has a wildcard.
#[test]
fn the_receiver_has_exactly_these_roles_bindings_and_rules() {
    for (files, rules) in [(base(), 15), (cert_manager(), 1), (ca_namespace(), 1)] {
        let files = files.unwrap();
        let of_rbac = files.iter().filter(|file| file.content.contains("apiVersion: rbac.authorization.k8s.io/"));
        assert_eq!(of_rbac.map(|file| file.name.as_str()).collect::<Vec<_>>(), ["role.yaml", "rolebinding.yaml"]);
        let role = read(&files, "role");
        let binding = read(&files, "rolebinding");
        assert_eq!((&role["kind"], &binding["kind"]), (&json!("Role"), &json!("RoleBinding")));
        let name = &role["metadata"]["name"];
        assert_eq!(
            (role["rules"].as_array().map(Vec::len), role["rules"].to_string().contains('*')),
            (Some(rules), false),
            "{name}"
        );
        let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
        let subjects = json!([{"kind": "ServiceAccount", "name": NAME, "namespace": KCP_NAMESPACE}]);
        assert_eq!((&binding["roleRef"], &binding["subjects"]), (&reference, &subjects));
    }
}

#[test]
fn misspelled_settings_are_rejected() {
    for name in both().keys() {
        let mut variables = both();
        let value = variables.remove(name).unwrap();
        variables.insert(format!("{name}S"), value);
        assert_eq!(receiver(&variables).unwrap_err(), format!("no flag reads {name}S"));
    }
    for (name, wrong) in [
        ("TIDEWATCH_AUTHORITY", "https://tidewatch.example.com:8443"),
        ("TIDEWATCH_RECEIVER_URL", "tidewatch.example.com:8443"),
        ("TIDEWATCH_ENROLMENT_URL", "http://tidewatch.example.com:8444"),
        ("TIDEWATCH_AGENT_IMAGE", ""),
        ("TIDEWATCH_ISSUER", "cert-manger:Issuer/tidewatch"),
    ] {
        let mut variables = both();
        assert!(variables.insert(name.to_owned(), wrong.to_owned()).is_some(), "{name} is not set");
        assert!(receiver(&variables).is_err(), "{name}={wrong}");
    }
    // The overlay needs both certificate and key.
    for name in ["TIDEWATCH_TLS_CERT", "TIDEWATCH_TLS_KEY"] {
        let mut variables = both();
        variables.remove(name).unwrap();
        assert!(receiver(&variables).is_err(), "without {name}");
    }
}
