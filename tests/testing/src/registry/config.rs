//! Configuration of a registry, and the files that it names.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{Access, Login, Tls, token_server::TokenServer};

/// File with the CA's certificate.
pub(super) const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const PASSWORDS: &str = "htpasswd";
const TOKEN_ROOT: &str = "token.crt";
/// Hash (bcrypt, cost 4) of the password of [`Login::TEST`].
const PASSWORD_HASH: &str = "$2b$04$yUocRDJWO39pJhvvb4qBd.cGdaRAV5a5ryyCLlHH7fmeeJvreulFu";
/// Realm of the authentication in challenges.
const REALM: &str = "registry of the test bed";

/// See the module.
pub(super) struct Config<'a> {
    pub(super) dir: &'a Path,
    pub(super) access: Access,
    pub(super) tls: Option<&'a Tls>,
    /// The token server of [`Access::Token`].
    pub(super) token_server: Option<&'a TokenServer>,
}

impl Config<'_> {
    /// Writes all files, and returns the path of the configuration.
    pub(super) fn write(&self, address: SocketAddr) -> io::Result<PathBuf> {
        if let Some(tls) = self.tls {
            self.file(CA, &tls.ca)?;
            self.file(CERTIFICATE, &tls.certificate)?;
            self.file(KEY, &tls.key)?;
        }
        if let Some(token_server) = self.token_server {
            self.file(TOKEN_ROOT, token_server.certificate())?;
        }
        if self.access == Access::Basic {
            self.file(PASSWORDS, &format!("{}:{PASSWORD_HASH}\n", Login::TEST.user))?;
        }
        // JSON is valid YAML.
        self.file("config.yml", &self.content(address).to_string())
    }

    fn content(&self, address: SocketAddr) -> Value {
        // The secret protects the state of uploads against clients, of which a test has only its own.
        let mut http = json!({"addr": address.to_string(), "secret": "test"});
        if self.tls.is_some() {
            http["tls"] = json!({"certificate": self.path(CERTIFICATE), "key": self.path(KEY)});
        }
        let auth = match (self.access, self.token_server) {
            (Access::Basic, _) => json!({"htpasswd": {"realm": REALM, "path": self.path(PASSWORDS)}}),
            (Access::Token, Some(token_server)) => json!({"token": {
                "realm": token_server.realm(), "service": token_server.service(), "issuer": token_server.issuer(),
                "rootcertbundle": self.path(TOKEN_ROOT),
            }}),
            (Access::Anonymous | Access::Token, _) => json!({}),
        };
        json!({
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": self.path("data")}, "delete": {"enabled": true}},
            "http": http,
            "auth": auth,
        })
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    fn file(&self, name: &str, content: &str) -> io::Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, content)?;
        Ok(path)
    }
}
