//! API keys: who calls, and which models they may use.
//!
//! ```yaml
//! - name: alice                      # in logs, and her flow in the line
//!   hash: sha256:9f86d081884c7d65…   # of the key; the key itself is nowhere
//!   models: [chat, default/coder]    # names, or namespace/*; absent: every model
//!   namespace: default               # its caller's, for Models that only their namespace may use
//!   requestsPerMinute: 600           # limits of this caller, at each router; absent: none
//!   tokensPerMinute: 100000          # of prompts and answers together
//!   maxConcurrency: 8                # requests whose answer has not left
//! ```
//!
//! Keys are drawn by us with 256 bits of chance, so a plain hash protects them: nothing can be guessed. The file is
//! read again when it changes; one that cannot be read changes nothing, and says so once.
//!
//! What a caller has used of its limits survives that. It deliberately does **not** log or keep a key.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, header};
use pilotlight_api::model::Visibility;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::hold::hash;
use crate::limits::{Account, Limits, Permit};
use crate::openai::{ApiError, Code};
use crate::registry::{ModelView, Registry};

/// Every request is compared with every key: 4,096 × 32 bytes are looked through in about 20 µs.
const KEYS_MAX: usize = 4_096;
/// 4,096 keys with their models.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// How often the file is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A file of keys that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It cannot be read.
    #[error("read the API keys in {path:?} (--api-keys; `pilotlight key new NAME` makes its lines)")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a list of keys.
    #[error(
        "the API keys in {path:?} are no list of `name`, `hash`, and perhaps `models`, `namespace` and limits (`pilotlight key new NAME` makes its lines)"
    )]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where.
        source: serde_yaml::Error,
    },
    /// A key that cannot be used.
    #[error(
        "the API key `{name}` in {path:?} {what}; `pilotlight key new NAME` prints a line that can be used"
    )]
    Key {
        /// Which file.
        path: PathBuf,
        /// Whose key.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Too much of a good thing.
    #[error("{path:?} has more than {KEYS_MAX} API keys, or more than {FILE_BYTES_MAX} bytes")]
    TooMany {
        /// Which file.
        path: PathBuf,
    },
}

/// The hash of a key, as the file has it.
pub fn key_hash(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Line {
    name: String,
    hash: String,
    #[serde(default)]
    models: Option<Vec<String>>,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    requests_per_minute: Option<NonZeroU32>,
    #[serde(default)]
    tokens_per_minute: Option<NonZeroU32>,
    #[serde(default)]
    max_concurrency: Option<NonZeroU32>,
}

/// Somebody who has a key.
#[derive(Debug)]
pub(crate) struct Caller {
    name: String,
    models: Option<Vec<String>>,
    namespace: Option<String>,
    /// None: it has no limits.
    account: Option<Arc<Account>>,
}

/// Who calls.
#[derive(Clone, Debug)]
pub(crate) enum Who {
    /// Keys are off.
    Anybody,
    Known(Arc<Caller>),
}

type List = Vec<([u8; 32], Arc<Caller>)>;

/// See the module.
#[derive(Debug)]
pub(crate) struct Keys {
    path: PathBuf,
    list: RwLock<List>,
}

impl Keys {
    pub(crate) fn load(path: &Path) -> Result<Self, KeysError> {
        Ok(Keys { path: path.to_owned(), list: RwLock::new(read(path, &List::new())?) })
    }

    /// Who sends these headers, or the 401.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Who, ApiError> {
        let refused = |message: &str| ApiError::new(Code::InvalidApiKey, message);
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given
            .and_then(|text| text.split_once(' '))
            .filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
        let Some((_, key)) = given else {
            return Err(refused("no API key: send it as `Authorization: Bearer KEY`"));
        };
        let digest: [u8; 32] = Sha256::digest(key.trim().as_bytes()).into();
        let list = self.list.read().unwrap_or_else(PoisonError::into_inner);
        // All of all keys, whatever matches: the time tells nothing.
        let mut found = None;
        for (own, caller) in list.iter() {
            if std::hint::black_box(own.iter().zip(&digest).fold(0, |diff, (a, b)| diff | (a ^ b))) == 0 {
                found = Some(caller);
            }
        }
        found
            .map(|caller| Who::Known(caller.clone()))
            .ok_or_else(|| refused("this API key is not known here; whoever runs this server gives them out"))
    }

    /// Reads the file again when it changes; never ends. Dropping it is safe: the keys then stay as they are.
    pub(crate) async fn keep_fresh(&self) {
        let mut seen = state_of(&self.path).await;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = state_of(&self.path).await;
            if now == seen {
                continue;
            }
            seen = now;
            let path = self.path.clone();
            let before = self.list.read().unwrap_or_else(PoisonError::into_inner).clone();
            match tokio::task::spawn_blocking(move || read(&path, &before)).await {
                Ok(Ok(list)) => {
                    tracing::info!(path = ?self.path, keys = list.len(), "API keys read again");
                    *self.list.write().unwrap_or_else(PoisonError::into_inner) = list;
                }
                Ok(Err(error)) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(%error, cause, "the API keys stay as they were");
                }
                Err(_runtime_ends) => return,
            }
        }
    }
}

impl Who {
    /// The flow of those who name none.
    pub(crate) fn flow(&self) -> u64 {
        match self {
            Who::Anybody => 0,
            Who::Known(caller) => hash(&[caller.name.as_bytes()]),
        }
    }

    /// Admits a request, or the 429.
    pub(crate) fn admit(&self) -> Result<Option<Arc<Permit>>, ApiError> {
        let Who::Known(caller) = self else { return Ok(None) };
        let Some(account) = &caller.account else { return Ok(None) };
        let over = match account.admit(Instant::now()) {
            Ok(permit) => return Ok(Some(Arc::new(permit))),
            Err(over) => over,
        };
        let message = format!("this API key may have {}; send it again after Retry-After", over.what);
        let until = over.seconds.unwrap_or(1.0).ceil().max(1.0) as u32;
        Err(ApiError { retry_after: Some(until), ..ApiError::new(Code::RateLimitExceeded, message) })
    }

    /// Whether the model may be used.
    pub(crate) fn may_use(&self, model: &ModelView, registry: &Registry) -> bool {
        let Who::Known(caller) = self else { return true };
        let own_namespace = caller.namespace.as_ref() == Some(&model.name.namespace);
        if model.visibility == Visibility::Namespace && !own_namespace {
            return false;
        }
        let means = |name: &String| match name.strip_suffix("/*") {
            Some(namespace) => namespace == model.name.namespace,
            None => registry.resolve(name).is_some_and(|meant| meant.name == model.name),
        };
        caller.models.as_ref().is_none_or(|models| models.iter().any(means))
    }

    /// The same as an error.
    pub(crate) fn must_use(
        &self,
        asked: &str,
        model: &ModelView,
        registry: &Registry,
    ) -> Result<(), ApiError> {
        if self.may_use(model, registry) {
            return Ok(());
        }
        let message =
            format!("this API key may not use the model `{asked}`; GET /v1/models lists those it may");
        Err(ApiError { param: Some("model".into()), ..ApiError::new(Code::ModelNotAllowed, message) })
    }
}

/// What changes with a file's content.
async fn state_of(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = tokio::fs::metadata(path).await.ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

/// Reads the file. Who was there `before` with the same limits goes on with what is left of them.
fn read(path: &Path, before: &List) -> Result<List, KeysError> {
    use std::io::Read as _;
    let failed = |source| KeysError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(KeysError::TooMany { path: path.to_owned() });
    }
    // An empty file is a list of none.
    let lines: Option<Vec<Line>> =
        serde_yaml::from_str(&text).map_err(|source| KeysError::Parse { path: path.to_owned(), source })?;
    let lines = lines.unwrap_or_default();
    if lines.len() > KEYS_MAX {
        return Err(KeysError::TooMany { path: path.to_owned() });
    }
    let mut list: List = Vec::with_capacity(lines.len());
    for Line { name, hash, models, namespace, requests_per_minute, tokens_per_minute, max_concurrency } in
        lines
    {
        let wrong = |what| KeysError::Key { path: path.to_owned(), name: name.clone(), what };
        let digest =
            digest_of(&hash).ok_or_else(|| wrong("has no `hash` of the form sha256:<64 hex digits>"))?;
        if list.iter().any(|(own, _)| *own == digest) {
            return Err(wrong("has the hash of another"));
        }
        let limits = Limits { requests_per_minute, tokens_per_minute, max_concurrency };
        let known =
            before.iter().filter(|(own, _)| *own == digest).find_map(|(_, caller)| caller.account.clone());
        let account = known
            .filter(|account| account.limits() == limits)
            .or_else(|| Account::new(limits, Instant::now()));
        list.push((digest, Arc::new(Caller { name, models, namespace, account })));
    }
    Ok(list)
}

fn digest_of(text: &str) -> Option<[u8; 32]> {
    let hex = text.strip_prefix("sha256:").filter(|hex| hex.len() == 64 && hex.is_ascii())?;
    let mut digest = [0; 32];
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn bearer(key: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(key).unwrap())])
    }

    #[test]
    fn who_has_a_key_is_known_and_nobody_else() {
        let file = file(&format!(
            "- name: alice\n  hash: {}\n- {{name: bob, hash: {}}}\n",
            key_hash("a"),
            key_hash("b")
        ));
        let keys = Keys::load(file.path()).unwrap();
        for (header, name) in [("Bearer a", "alice"), ("bearer  b ", "bob")] {
            let Ok(Who::Known(caller)) = keys.caller(&bearer(header)) else { panic!("{header}") };
            assert_eq!(caller.name, name);
        }
        for header in
            ["", "a", "Bearer", "Bearer ", "Bearer c", "Basic a", &format!("Bearer {}", key_hash("a"))]
        {
            let error = keys.caller(&bearer(header)).unwrap_err();
            assert_eq!(
                (error.code, error.message.contains("Bearer c")),
                (Code::InvalidApiKey, false),
                "{header}"
            );
        }
        assert!(keys.caller(&HeaderMap::new()).is_err());
    }

    #[test]
    fn a_file_that_cannot_be_used_says_why_and_shows_no_key() {
        for (text, why) in [
            ("- {name: a, hash: secret}", "`a`"),
            ("- {name: a, hash: sha256:zz}", "sha256:<64 hex digits>"),
            ("- {name: a, key: secret}", "`name`, `hash`"),
            ("just text", "`name`, `hash`"),
            (&format!("[{{name: a, hash: {0}}}, {{name: b, hash: {0}}}]", key_hash("x")), "of another"),
        ] {
            let error = Keys::load(file(text).path()).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("secret"), "{text}: {error}");
        }
        assert!(Keys::load(Path::new("/nowhere/keys")).unwrap_err().to_string().contains("/nowhere/keys"));
        assert!(Keys::load(file("").path()).unwrap().list.read().unwrap().is_empty());
    }
}
