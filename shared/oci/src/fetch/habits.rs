//! How registries deviate from the specification and from each other, each over TLS connections on the loopback
//! interface: what a pull of a module gets, or the exact sentence that its user sees.
//!
//! The names lead to one server that plays the registry, its token server and its content network. Sources are the public
//! documentation of the registries and the issues that the rows name.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use hyper_util::client::proxy::matcher::Matcher;
use tidewatch_kit::addresses::AddressRules;

use super::*;
use crate::{
    credentials::RegistryAddress,
    testing::{FakeRegistry, Protection, Reply},
    tls::{
        self,
        tests::{ca, server_of},
    },
};

const COMPONENT: &str = "component-descriptors/kyma-project.io/module/sample";
/// Names that lead to the server.
const SERVED: &[&str] = &[
    "index.docker.io",
    "auth.docker.io",
    "production.cloudflare.docker.com",
    "ghcr.io",
    "pkg-containers.githubusercontent.com",
    "1.dkr.ecr.eu-central-1.amazonaws.com",
    "starport.s3.eu-central-1.amazonaws.com",
    "europe-docker.pkg.dev",
    "example.jfrog.io",
    "harbor.example.com",
    "minio.example.com",
    "metadata.example.com",
    "registry.gitlab.com",
    "gitlab.com",
    "cdn.registry.gitlab-static.net",
    "quay.io",
    "cdn01.quay.io",
    "zot.example.com",
    "registry.example.com",
    "mirror.example.com",
    "sso.example.com",
];
/// User `u` with the password `p`.
const BASIC: &str = "Basic dTpw";
/// A key of a service account, as Google issues it: several lines.
const JSON_KEY: &str = "{\n  \"type\": \"service_account\"\n}\n";

/// Puts the port in the place of `:0` in a text.
type Place<'a> = &'a dyn Fn(&str) -> String;

/// A registry, and what a pull from it leads to.
struct Habit {
    name: &'static str,
    /// Address without port.
    address: &'static str,
    user: Option<(&'static str, &'static str)>,
    /// `--oci-registry-allowed-hosts`.
    allowed: &'static [&'static str],
    /// Changes a registry that serves the module to everyone.
    plays: fn(&FakeRegistry, Place<'_>),
    /// Sentence of the refusal, without ports; `None` if the module is pulled.
    refusal: Option<&'static str>,
}

const ANONYMOUS: Option<(&str, &str)> = None;
const USER: Option<(&str, &str)> = Some(("u", "p"));

/// Demands a token that the realm issues.
fn tokens(registry: &FakeRegistry, challenge: &str, realm: &str, issued: &'static str) {
    registry.protect("Bearer t", challenge);
    registry.script(realm, [Reply::content(issued)]);
}

/// Demands user and password, and answers all other requests as if the repository did not exist.
fn hide(registry: &FakeRegistry, status: u16, ping: Reply) {
    registry.refuse(Protection { authorization: BASIC.to_owned(), refusal: Reply::status(status), ping });
}

fn basic_challenge(status: u16) -> Reply {
    Reply::with(status, "www-authenticate", "Basic realm=\"Registry\"")
}

const TOKEN: &str = r#"{"token":"t"}"#;

#[rustfmt::skip]
const HABITS: &[Habit] = &[
    // docs.docker.com/reference/api/registry/auth; distribution/distribution#1589: the response has `token` alone.
    Habit {
        name: "Docker Hub, with a token server and a content network of other names",
        address: "docker.io/example", user: USER, allowed: &["auth.docker.io"],
        plays: |registry, at| {
            let challenge = r#"Bearer realm="https://auth.docker.io:0/token",service="registry.docker.io",scope="repository:a:pull""#;
            tokens(registry, &at(challenge), "auth.docker.io", TOKEN);
            registry.move_blobs(307, &at("https://production.cloudflare.docker.com:0"));
        },
        refusal: None,
    },
    Habit {
        name: "Docker Hub, whose token server is not listed",
        address: "docker.io/example", user: USER, allowed: &[],
        plays: |registry, at| tokens(registry, &at(r#"Bearer realm="https://auth.docker.io:0/token""#), "auth.docker.io", TOKEN),
        refusal: Some("the registry names the token server https://auth.docker.io/token, which is not its own host, not listed in --oci-registry-allowed-hosts, or without TLS"),
    },
    // docs.docker.com/docker-hub/usage/pulls: 429, with or without Retry-After.
    Habit {
        name: "Docker Hub above its rate limit",
        address: "docker.io/example", user: ANONYMOUS, allowed: &["auth.docker.io"],
        plays: |registry, _| registry.script("/manifests/", [Reply::with(429, "retry-after", "60"), Reply::status(429)]),
        refusal: Some("the registry limits the rate of requests (429)"),
    },
    Habit {
        name: "GHCR, anonymous",
        address: "ghcr.io/example", user: ANONYMOUS, allowed: &[],
        plays: |registry, at| {
            tokens(registry, &at(r#"Bearer realm="https://ghcr.io:0/token",service="ghcr.io""#), "/token?", TOKEN);
            registry.move_blobs(307, &at("https://pkg-containers.githubusercontent.com:0"));
        },
        refusal: None,
    },
    // apple/container#183: a bad token gets 403 of the token server.
    Habit {
        name: "GHCR with an expired personal token",
        address: "ghcr.io/example", user: USER, allowed: &[],
        plays: |registry, at| {
            registry.protect("Bearer t", &at(r#"Bearer realm="https://ghcr.io:0/token",service="ghcr.io""#));
            registry.script("/token?", [Reply::status(403)]);
        },
        refusal: Some("the registry refused the credentials"),
    },
    // Mic92/niks3#229: 404 with "OCI index found" unless indexes are accepted.
    Habit {
        name: "GHCR with an index under the tag",
        address: "ghcr.io/example", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| {
            let index = br#"{"schemaVersion":2,"manifests":[]}"#;
            let repository = format!("example/{COMPONENT}");
            registry.manifest(&repository, "1.0.0", "application/vnd.oci.image.index.v1+json", index);
        },
        refusal: Some("ghcr.io/example/component-descriptors/kyma-project.io/module/sample:1.0.0 is an image index (OCI image index); a module is a single image manifest"),
    },
    // docs.aws.amazon.com/AmazonECR: user AWS, layers come from buckets of S3, which refuse a second authorization.
    Habit {
        name: "ECR",
        address: "1.dkr.ecr.eu-central-1.amazonaws.com", user: USER, allowed: &[],
        plays: |registry, at| {
            registry.protect(BASIC, r#"Basic realm="https://1.dkr.ecr.eu-central-1.amazonaws.com/",service="ecr.amazonaws.com""#);
            registry.move_blobs(307, &at("https://starport.s3.eu-central-1.amazonaws.com:0"));
        },
        refusal: None,
    },
    Habit {
        name: "ECR after the 12 hours of its token",
        address: "1.dkr.ecr.eu-central-1.amazonaws.com", user: USER, allowed: &[],
        plays: |registry, _| registry.script("/manifests/", [Reply::status(403)]),
        refusal: Some("the registry's credentials do not permit reading 1.dkr.ecr.eu-central-1.amazonaws.com/component-descriptors/kyma-project.io/module/sample:1.0.0"),
    },
    Habit {
        name: "ECR whose signed URL has expired",
        address: "1.dkr.ecr.eu-central-1.amazonaws.com", user: USER, allowed: &[],
        plays: |registry, at| {
            registry.move_blobs(307, &at("https://starport.s3.eu-central-1.amazonaws.com:0"));
            registry.script("starport.s3", [Reply::status(403)]);
        },
        refusal: Some("starport.s3.eu-central-1.amazonaws.com, to which the registry redirects, answered with status 403"),
    },
    // rancher/rancher#6956 for the key; ahmetb/serverless-registry-proxy#8 for the relative redirect.
    Habit {
        name: "Google Artifact Registry with a JSON key",
        address: "europe-docker.pkg.dev/project/modules", user: Some(("_json_key", JSON_KEY)), allowed: &[],
        plays: |registry, at| {
            registry.protect("Bearer t", &at(r#"Bearer realm="https://europe-docker.pkg.dev:0/v2/token",service="europe-docker.pkg.dev""#));
            registry.script("/v2/token", [Reply::content(r#"{"token":"t","expires_in":"3599"}"#)]);
            registry.move_blobs(302, "");
        },
        refusal: None,
    },
    // containerd/containerd#6339 for the realm; anonymous access answers 404 for what is private.
    Habit {
        name: "Artifactory, by repository path, that hides what is private",
        address: "example.jfrog.io/modules", user: USER, allowed: &[],
        plays: |registry, at| {
            let challenge = at(r#"Bearer realm="https://example.jfrog.io:0/artifactory/api/docker/modules/v2/token",service="example.jfrog.io""#);
            let ping = Reply::with(401, "www-authenticate", challenge);
            registry.refuse(Protection { authorization: "Bearer t".to_owned(), refusal: Reply::status(404), ping });
            registry.script("/api/docker/modules/v2/token", [Reply::content(r#"{"token":"","access_token":"t","expires_in":null}"#)]);
        },
        refusal: None,
    },
    Habit {
        name: "Artifactory, that hides what is private, without credentials",
        address: "example.jfrog.io/modules", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| hide(registry, 404, basic_challenge(401)),
        refusal: Some("example.jfrog.io/modules/component-descriptors/kyma-project.io/module/sample:1.0.0 does not exist, or is not visible without credentials"),
    },
    // goharbor/harbor#714 for the challenge; goharbor.io/docs for robot accounts and the redirect to the storage.
    Habit {
        name: "Harbor with a robot account, and a storage of its own in the same network that is listed",
        address: "harbor.example.com/modules", user: Some(("robot$tidewatch", "p")), allowed: &["minio.example.com"],
        plays: |registry, at| {
            tokens(registry, &at(r#"Bearer realm="https://harbor.example.com:0/service/token",service="harbor-registry""#), "/service/token", r#"{"token":"t","expires_in":1800}"#);
            registry.move_blobs(307, &at("https://minio.example.com:0"));
        },
        refusal: None,
    },
    Habit {
        name: "Harbor with a storage in a private network",
        address: "harbor.example.com/modules", user: USER, allowed: &[],
        plays: |registry, at| registry.move_blobs(307, &at("https://private.example.com:0")),
        refusal: Some("a redirect of the registry is not followed: its host private.example.com is not listed in --oci-registry-allowed-hosts, and has the address 10.0.0.1: it is a private address"),
    },
    Habit {
        name: "a registry that redirects to a metadata server by name",
        address: "harbor.example.com", user: USER, allowed: &[],
        plays: |registry, at| registry.move_blobs(307, &at("https://metadata.example.com:0")),
        refusal: Some("a redirect of the registry is not followed: its host metadata.example.com is not listed in --oci-registry-allowed-hosts, and has the address 169.254.169.254: it is an address of a cloud's metadata service"),
    },
    Habit {
        name: "a registry that redirects to an address",
        address: "harbor.example.com", user: USER, allowed: &[],
        plays: |registry, at| registry.move_blobs(307, &at("https://[fd00:ec2::254]:0")),
        refusal: Some("a redirect of the registry is not followed: its host [fd00:ec2::254] is not listed in --oci-registry-allowed-hosts, and has the address fd00:ec2::254: it is an address of a cloud's metadata service"),
    },
    // docs.gitlab.com/user/packages/container_registry: nested names, tokens of 5 to 15 minutes.
    Habit {
        name: "GitLab, whose token ends while the module is pulled",
        address: "registry.gitlab.com/group/subgroup/project", user: USER, allowed: &["gitlab.com"],
        plays: |registry, at| {
            let challenge = at(r#"Bearer realm="https://gitlab.com:0/jwt/auth",service="container_registry",error="invalid_token""#);
            tokens(registry, &challenge, "/jwt/auth", TOKEN);
            registry.move_blobs(307, &at("https://cdn.registry.gitlab-static.net:0"));
            // The first blob gets 401 although the token was accepted for the manifest.
            registry.interrupt("/blobs/", Reply::with(401, "www-authenticate", challenge));
        },
        refusal: None,
    },
    // docs.quay.io/api: tokens of /v2/auth, and manifests of Docker's schema 2 for what old clients pushed.
    Habit {
        name: "Quay with a manifest of Docker's schema 2",
        address: "quay.io/example", user: ANONYMOUS, allowed: &[],
        plays: |registry, at| {
            tokens(registry, &at(r#"Bearer realm="https://quay.io:0/v2/auth",service="quay.io""#), "/v2/auth", TOKEN);
            let kind = "application/vnd.docker.distribution.manifest.v2+json";
            registry.retype(&format!("example/{COMPONENT}"), "1.0.0", kind);
            registry.move_blobs(302, &at("https://cdn01.quay.io:0"));
        },
        refusal: None,
    },
    // project-zot/zot#3869 and #1917: /v2/ answers 200, with or without a challenge, if anything is public.
    Habit {
        name: "Zot with public repositories, for a private one",
        address: "zot.example.com", user: USER, allowed: &[],
        plays: |registry, _| hide(registry, 401, basic_challenge(200)),
        refusal: None,
    },
    Habit {
        name: "Zot with public repositories, without a challenge anywhere",
        address: "zot.example.com", user: USER, allowed: &[],
        plays: |registry, _| hide(registry, 403, Reply::status(200)),
        refusal: None,
    },
    Habit {
        name: "distribution with htpasswd",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, _| registry.protect(BASIC, r#"Basic realm="Registry Realm""#),
        refusal: None,
    },
    Habit {
        name: "distribution that demands a password and gets none",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| registry.protect(BASIC, r#"Basic realm="Registry Realm""#),
        refusal: Some("the registry refused the request without credentials"),
    },
    Habit {
        name: "distribution behind a gateway that answers 502 once",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, _| registry.interrupt("/manifests/", Reply::status(502)),
        refusal: None,
    },
    Habit {
        name: "distribution that is down",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, _| registry.script("/v2/", [Reply::status(503)]),
        refusal: Some("the registry failed with status 503"),
    },
    Habit {
        name: "challenges in several forms, unquoted, in another order",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, at| {
            registry.protect("Bearer t", &at("Negotiate, Basic realm=x, bearer scope=repository:a:pull , SERVICE=s, realm=https://registry.example.com:0/token"));
            registry.script("/token?", [Reply::content(TOKEN)]);
        },
        refusal: None,
    },
    Habit {
        name: "manifests without type and digest",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| registry.manifest_headers(|headers| *headers = vec![("content-type", "application/octet-stream".to_owned())]),
        refusal: None,
    },
    Habit {
        name: "manifests with a digest of another algorithm",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| registry.manifest_headers(|headers| headers.iter_mut().for_each(|(name, value)| if *name == "docker-content-digest" { *value = "sha512:00".to_owned() })),
        refusal: None,
    },
    // kubernetes/registry.k8s.io: manifests are redirected, too.
    Habit {
        name: "manifests that are redirected to a listed host",
        address: "registry.example.com", user: ANONYMOUS, allowed: &["mirror.example.com"],
        plays: |registry, at| {
            let place = format!("/v2/{COMPONENT}/manifests/1.0.0");
            registry.put("/there".to_owned(), registry.content(&place));
            registry.put(place, Reply::with(307, "location", at("https://mirror.example.com:0/there")));
        },
        refusal: None,
    },
    Habit {
        name: "manifests that are redirected to another host",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, at| registry.script("/manifests/", [Reply::with(307, "location", at("https://mirror.example.com:0/there"))]),
        refusal: Some("a redirect of the registry is not followed: its host mirror.example.com is not listed in --oci-registry-allowed-hosts"),
    },
    Habit {
        name: "blobs that are redirected to plain HTTP",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, at| registry.move_blobs(307, &at("http://mirror.example.com:0")),
        refusal: Some("a redirect of the registry is not followed: it leads from https to http"),
    },
    Habit {
        name: "a login page in place of the registry",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, _| registry.script("/v2/", [Reply::Of(200, vec![("content-type", "text/html; charset=utf-8".to_owned())], "<html>Log in".into())]),
        refusal: Some("malformed response of the registry: it is a web page; the address is not that of a registry, or a login page or a proxy answers for it"),
    },
    Habit {
        name: "a proxy that sends to a login page",
        address: "registry.example.com", user: USER, allowed: &[],
        plays: |registry, at| registry.script("/v2/", [Reply::with(302, "location", at("https://sso.example.com:0/login"))]),
        refusal: Some("a redirect of the registry is not followed: its host sso.example.com is not listed in --oci-registry-allowed-hosts"),
    },
    Habit {
        name: "bodies without length",
        address: "registry.example.com", user: ANONYMOUS, allowed: &[],
        plays: |registry, _| registry.chunk(),
        refusal: None,
    },
    Habit {
        name: "a name with a dead address before the living one",
        address: "mirror.example.com", user: ANONYMOUS, allowed: &[],
        plays: |_, _| {},
        refusal: None,
    },
];

/// Addresses of the names: the loopback interface, and for some what only a redirect could name.
fn lookup(name: &str) -> io::Result<Vec<SocketAddr>> {
    let of = |address: &str| SocketAddr::from((address.parse::<IpAddr>().unwrap(), 0));
    Ok(match name {
        "private.example.com" => vec![of("10.0.0.1")],
        "metadata.example.com" => vec![of("169.254.169.254")],
        // Nothing listens there.
        "mirror.example.com" => vec![of("127.0.0.2"), of("127.0.0.1")],
        _ if SERVED.contains(&name) => vec![of("127.0.0.1")],
        _ => return Err(io::ErrorKind::NotFound.into()),
    })
}

/// Pulls the module: its manifest, and the blobs of it.
async fn pull(fetcher: &Fetcher, target: &RegistryTarget) -> Result<(), FetchError> {
    let (manifest, ..) = fetcher.manifest(target, COMPONENT, Reference::Tag("1.0.0")).await?;
    for blob in [&manifest.config].into_iter().chain(&manifest.layers) {
        fetcher.blob(target, COMPONENT, blob.digest, Size::Exactly(blob.size)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn registries_are_read_in_all_their_habits() {
    let folder = tempfile::tempdir().unwrap();
    let authority = ca();
    let file = folder.path().join("ca.pem");
    fs::write(&file, authority.pem()).unwrap();
    for habit in HABITS {
        let Habit { name, address, user, allowed, plays, refusal } = habit;
        let registry = FakeRegistry::default();
        let (port, _server) = registry.listen(Some(server_of(&authority, SERVED))).await;
        let (host, path) = address.split_once('/').unwrap_or((address, ""));
        let address: RegistryAddress = format!("{host}:{port}/{path}").parse().unwrap();
        registry.component(&address.repository(COMPONENT), "1.0.0", "descriptor");
        plays(&registry, &|text| text.replace(":0", &format!(":{port}")));

        let loopback = vec!["127.0.0.0/8".parse().unwrap()];
        let rules = AddressRules { allow: loopback, deny: Vec::new() };
        let roots = tls::roots(Some(&file)).unwrap();
        let direct = Matcher::builder().build();
        let transports = tls::transports_with(roots, direct, CONNECT_TIMEOUT, rules, Arc::new(lookup)).unwrap();
        let listed: Vec<_> = allowed.iter().map(|host| host.parse().unwrap()).collect();
        let fetcher = Fetcher::new(transports, listed.into(), Metrics::default());
        let credentials = user
            .map(|(username, password)| Credentials::Basic { username: username.into(), password: password.into() });
        let target = RegistryTarget::new(address, credentials);

        // The lookups repeat what may pass by itself.
        let pulled = match pull(&fetcher, &target).await {
            Err(error) if error.is_retryable() => pull(&fetcher, &target).await,
            pulled => pulled,
        };
        let sentence = pulled.err().map(|error| error.to_string().replace(&format!(":{port}"), ""));
        assert_eq!(sentence.as_deref(), *refusal, "{name}");
        // No host of a redirect gets credentials.
        let own = target.address.server();
        for request in registry.received() {
            let to = request.uri.split(':').next().unwrap();
            let may_know =
                to == own.host() || ["token", "/jwt/auth", "/v2/auth"].iter().any(|realm| request.uri.contains(realm));
            assert!(may_know || request.authorization.is_none(), "{name}: {}", request.uri);
        }
    }
}
