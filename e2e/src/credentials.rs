//! Certificates of a cluster that lives for minutes: one authority, one server, and a client for each part.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};

/// The authority, and the folder where everything that it makes lies.
pub(crate) struct Credentials {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Credentials {
    /// Makes the authority (`ca.crt`), the server's certificate (`server.crt`, `server.key`) and the key pair that
    /// signs accounts' tokens (`accounts.key`, `accounts.pub`).
    pub(crate) fn new(folder: &Path) -> Result<Credentials, rcgen::Error> {
        let mut params = named("pilotlight-tests", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let credentials = Credentials { folder: folder.to_owned(), authority };
        credentials.write("ca.crt", &credentials.authority.pem());

        let names = ["127.0.0.1", "10.0.0.1", "localhost", "kubernetes.default.svc"];
        let mut server = CertificateParams::new(names.map(String::from))?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        credentials.sign("server", &server)?;

        let accounts = KeyPair::generate()?;
        credentials.write("accounts.key", &accounts.serialize_pem());
        credentials.write("accounts.pub", &accounts.public_key_pem());
        Ok(credentials)
    }

    /// A kubeconfig for a client certificate of this user and group.
    pub(crate) fn client(
        &self,
        server: &str,
        user: &str,
        group: Option<&str>,
    ) -> Result<PathBuf, rcgen::Error> {
        let mut params = named(user, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let file = user.replace(':', "-");
        self.sign(&file, &params)?;
        let path = |end: &str| self.folder.join(format!("{file}.{end}")).display().to_string();
        let user = json!({ "client-certificate": path("crt"), "client-key": path("key") });
        Ok(self.kubeconfig(server, &file, &user))
    }

    /// A kubeconfig for a token.
    pub(crate) fn bearer(&self, server: &str, name: &str, token: &str) -> PathBuf {
        self.kubeconfig(server, name, &json!({ "token": token }))
    }

    fn kubeconfig(&self, server: &str, name: &str, user: &Value) -> PathBuf {
        let authority = self.folder.join("ca.crt").display().to_string();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": server, "certificate-authority": authority } }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        self.write(&format!("{name}.kubeconfig"), &config.to_string())
    }

    fn sign(&self, name: &str, params: &CertificateParams) -> Result<(), rcgen::Error> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.authority)?;
        self.write(&format!("{name}.crt"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.join(name);
        fs::write(&path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
        path
    }
}

fn named(user: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.remove(DnType::CommonName);
    params.distinguished_name.push(DnType::CommonName, user);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}
