//! Headers in and out.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use pilotlight_domain::{Phase, Phases, SessionId, Tier};

use crate::hold::hash;
use crate::openai::ApiError;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_WAIT_MS: HeaderName = HeaderName::from_static("x-pilotlight-max-wait-ms");
const COLD_START: HeaderName = HeaderName::from_static("x-pilotlight-cold-start");
const SERVED_BY: HeaderName = HeaderName::from_static("x-pilotlight-served-by");
pub(crate) const MIGRATIONS: HeaderName = HeaderName::from_static("x-pilotlight-migrations");
const QUEUE_MS: HeaderName = HeaderName::from_static("x-pilotlight-queue-ms");

/// Further choices add `.127` at most.
const REQUEST_ID_CHARS_MAX: usize = 124;

/// The client's request id if it can be a session's id, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> SessionId {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let given = given.filter(|text| text.len() <= REQUEST_ID_CHARS_MAX).and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        let made = format!("{:032x}", fastrand::u128(..));
        made.parse().expect("hexadecimal digits are a session id")
    })
}

/// A header's names: ours first, then those of others that mean the same.
type Names = [HeaderName; 2];
const PRIORITY: Names = [
    HeaderName::from_static("x-pilotlight-priority"),
    HeaderName::from_static("x-llm-d-inference-objective"),
];
const FAIRNESS_ID: Names = [
    HeaderName::from_static("x-pilotlight-fairness-id"),
    HeaderName::from_static("x-llm-d-inference-fairness-id"),
];
const SLO_TTFT_MS: Names =
    [HeaderName::from_static("x-pilotlight-slo-ttft-ms"), HeaderName::from_static("x-llm-d-slo-ttft-ms")];

/// Bands of priority; what lies beyond is the outermost one.
const PRIORITY_MAX: i32 = 1_000;

/// What a caller asks for beside the body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    /// Shorter than the Model's budgets.
    pub(crate) wait_max: Option<Duration>,
    /// Overrides the Model's cold-start policy.
    pub(crate) hold: Option<bool>,
    /// Begin on the CPU, where that serves while the model's device is not ready.
    pub(crate) on_cpu: bool,
    /// When the first token should be there.
    pub(crate) first_token: Option<Duration>,
    /// Its band in the line, instead of the Model's.
    pub(crate) priority: Option<i32>,
    /// Requests of one flow take turns with those of others.
    pub(crate) flow: Option<u64>,
}

impl Wishes {
    pub(crate) fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let (hold, on_cpu) = match text(headers, &COLD_START)? {
            None => (None, false),
            Some("hold") => (Some(true), false),
            Some("cpu") => (Some(true), true),
            Some("reject") => (Some(false), false),
            Some(_) => return Err(not_a(&COLD_START, "hold, reject or cpu")),
        };
        let mut first_token = None;
        for name in &SLO_TTFT_MS {
            let given = millis(headers, name)?;
            first_token = first_token.or(given);
        }
        let mut priority = None;
        for name in &PRIORITY {
            let given = text(headers, name)?.map(|text| band(name, text)).transpose()?;
            priority = priority.or(given);
        }
        let mut flow = None;
        for name in &FAIRNESS_ID {
            flow = flow.or(text(headers, name)?.map(|text| hash(&[text.as_bytes()])));
        }
        Ok(Wishes { wait_max: millis(headers, &MAX_WAIT_MS)?, hold, on_cpu, first_token, priority, flow })
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, ApiError> {
    headers.get(name).map(|value| value.to_str().map(str::trim).map_err(|_| not_a(name, "text"))).transpose()
}

fn millis(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Duration>, ApiError> {
    let Some(text) = text(headers, name)? else { return Ok(None) };
    let millis = text.parse().map_err(|_| not_a(name, "a number of milliseconds"))?;
    Ok(Some(Duration::from_millis(millis)))
}

/// A number, or one of the names that objectives commonly have; other names of objectives are ordinary.
fn band(name: &HeaderName, text: &str) -> Result<i32, ApiError> {
    match (text.parse::<i64>(), text.to_ascii_lowercase().as_str()) {
        (Ok(n), _) => Ok(n.clamp(i64::from(-PRIORITY_MAX), i64::from(PRIORITY_MAX)) as i32),
        _ if *name == PRIORITY[0] => Err(not_a(name, "a whole number")),
        (_, "critical") => Ok(1),
        (_, "sheddable") => Ok(-1),
        _ => Ok(0),
    }
}

fn not_a(name: &HeaderName, what: &str) -> ApiError {
    ApiError::bad(name.as_str(), format!("the header `{name}` is not {what}"))
}

/// What an answer tells of how it came about.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Served {
    /// `cpu`, `sim`, `gpu0`.
    pub(crate) device: String,
    /// The tier that its load started from, if it waited for one.
    pub(crate) from: Option<Tier>,
    pub(crate) queued: Duration,
    pub(crate) cold: Option<Cold>,
}

/// A cold start as its client sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cold {
    /// The tier that it started from.
    pub(crate) path: &'static str,
    pub(crate) phases: Phases,
}

/// How long it waited for a place, or for being refused one.
pub(crate) fn write_queued(headers: &mut HeaderMap, queued: Duration) {
    headers.insert(QUEUE_MS, HeaderValue::from(u64::try_from(queued.as_millis()).unwrap_or(u64::MAX)));
}

impl Served {
    /// `cpu`, `sim` or `gpu`: which one of them is nobody's business.
    pub(crate) fn kind(&self) -> &str {
        self.device.trim_end_matches(|c: char| c.is_ascii_digit())
    }

    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        write_queued(headers, self.queued);
        if let Ok(kind) = HeaderValue::from_str(self.kind()) {
            headers.insert(SERVED_BY, kind);
        }
        if let Some(Ok(value)) = self.cold.as_ref().map(|cold| HeaderValue::from_str(&cold.header())) {
            headers.insert(COLD_START, value);
        }
    }
}

impl Cold {
    /// `disk; seconds=0.750000; hold=0.010000; …`: the tier, the total, and its partition.
    fn header(&self) -> String {
        use std::fmt::Write as _;
        let mut text = format!("{}; seconds={:.6}", self.path, self.phases.total());
        for phase in Phase::ALL {
            let _infallible = write!(text, "; {}={:.6}", phase.as_str(), self.phases.get(phase));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_str(v).unwrap())).collect()
    }

    #[test]
    fn a_good_request_id_is_kept_and_a_bad_one_replaced() {
        assert_eq!(request_id(&headers(&[("x-request-id", "req-1")])).as_str(), "req-1");
        for bad in ["", "a b", "a/b", &"x".repeat(125)] {
            let made = request_id(&headers(&[("x-request-id", bad)]));
            assert_eq!(made.as_str().len(), 32, "{bad}");
        }
    }

    #[test]
    fn wishes_are_read_or_refused_by_name() {
        let wishes = Wishes::read(&headers(&[
            ("x-pilotlight-max-wait-ms", "250"),
            ("x-pilotlight-cold-start", "reject"),
        ]));
        let wait_max = Some(Duration::from_millis(250));
        assert_eq!(wishes, Ok(Wishes { wait_max, hold: Some(false), ..Wishes::default() }));
        for (name, value) in [
            ("x-pilotlight-max-wait-ms", "-1"),
            ("x-pilotlight-max-wait-ms", "soon"),
            ("x-pilotlight-cold-start", "x"),
            ("x-pilotlight-priority", "high"),
            ("x-pilotlight-slo-ttft-ms", "x"),
            ("x-llm-d-slo-ttft-ms", "-1"),
        ] {
            assert_eq!(Wishes::read(&headers(&[(name, value)])).unwrap_err().param.as_deref(), Some(name));
        }
    }

    #[test]
    fn priorities_and_flows_have_aliases_and_ours_win() {
        let priority = |list: &[(&'static str, &str)]| Wishes::read(&headers(list)).unwrap().priority;
        let (ours, alias) = ("x-pilotlight-priority", "x-llm-d-inference-objective");
        assert_eq!(priority(&[(ours, "-3")]), Some(-3));
        assert_eq!(priority(&[(ours, "999999999999")]), Some(PRIORITY_MAX));
        assert_eq!(priority(&[(ours, "7"), (alias, "1")]), Some(7));
        for (text, band) in [("5", 5), ("Critical", 1), ("sheddable", -1), ("batch", 0)] {
            assert_eq!(priority(&[(alias, text)]), Some(band), "{text}");
        }
        let flow = |name, value| Wishes::read(&headers(&[(name, value)])).unwrap().flow;
        assert_eq!(flow("x-pilotlight-fairness-id", "a"), flow("x-llm-d-inference-fairness-id", "a"));
        assert_ne!(flow("x-pilotlight-fairness-id", "a"), flow("x-pilotlight-fairness-id", "b"));
    }

    #[test]
    fn a_cold_start_is_told_with_its_partition() {
        let cold = Cold { path: "disk", phases: Phases { hold: 0.25, read: 0.5, ..Phases::default() } };
        let served = Served {
            device: "gpu0".into(),
            from: Some(Tier::Disk),
            queued: Duration::from_millis(12),
            cold: Some(cold),
        };
        let mut headers = HeaderMap::new();
        served.write(&mut headers);
        assert_eq!(headers["x-pilotlight-served-by"], "gpu");
        assert_eq!(headers["x-pilotlight-queue-ms"], "12");
        assert_eq!(
            headers["x-pilotlight-cold-start"],
            "disk; seconds=0.750000; hold=0.250000; decide=0.000000; order=0.000000; fetch=0.000000; \
             read=0.500000; copy=0.000000; warm=0.000000; prefill=0.000000"
        );
    }
}
