//! The certificates of one run: an authority, the server's, and one per user.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};

/// Signs, for as long as the run lasts.
pub(crate) struct Authority {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// A new one, in `ca.crt`; its key stays in memory. Beside it the keys that sign tokens of ServiceAccounts.
    pub(crate) fn new(folder: &Path) -> Result<Authority> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("pilotlight-test-ca", &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        write(folder, "ca.crt", &issuer.pem())?;
        let tokens = KeyPair::generate()?;
        write(folder, "tokens.key", &tokens.serialize_pem())?;
        write(folder, "tokens.pub", &tokens.public_key_pem())?;
        Ok(Authority { folder: folder.into(), issuer })
    }

    /// `NAME.crt` and `NAME.key` of a server at these addresses.
    pub(crate) fn server(&self, file: &str, addresses: &[Ipv4Addr]) -> Result<()> {
        let mut params =
            CertificateParams::new(["localhost".to_owned(), "kubernetes.default.svc".to_owned()])?;
        params.distinguished_name = name(file, &[]);
        params.subject_alt_names.extend(addresses.iter().map(|a| SanType::IpAddress(IpAddr::V4(*a))));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(file, params)
    }

    /// `NAME.crt` and `NAME.key` of a user in groups.
    pub(crate) fn user(&self, file: &str, user: &str, groups: &[&str]) -> Result<()> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name(user, groups);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(file, params)
    }

    fn sign(&self, file: &str, mut params: CertificateParams) -> Result<()> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        write(&self.folder, &format!("{file}.crt"), &certificate.pem())?;
        write(&self.folder, &format!("{file}.key"), &key.serialize_pem())
    }
}

/// Kubernetes reads the common name as the user, each organisation as a group.
fn name(user: &str, groups: &[&str]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, user);
    for group in groups {
        name.push(DnType::OrganizationName, *group);
    }
    name
}

fn write(folder: &Path, file: &str, text: &str) -> Result<()> {
    std::fs::write(folder.join(file), text).with_context(|| format!("write {file}"))
}
