//! Registering metrics, and saying which there are.
//!
//! Every part registers all of its metrics once, through a [`Register`]: names are `pilotlight_<part>_<what>_<unit>`,
//! and what was registered can be listed, also what has no value yet. The reference page is made from that list.
//!
//! It deliberately does **not** hold the metrics: each part's `metrics.rs` does, with a function per thing counted.

use std::cell::RefCell;

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, Result,
};
use serde::{Deserialize, Serialize};

/// What a metric counts like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Only goes up, until its process starts again.
    Counter,
    /// What is now.
    Gauge,
    /// How often which size was seen.
    Histogram,
}

/// One metric, as its reference tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// The whole name.
    pub name: String,
    /// How it counts.
    pub kind: Kind,
    /// What it is parted by.
    pub labels: Vec<String>,
    /// What it means.
    pub help: String,
}

/// Registers one part's metrics.
#[derive(Debug)]
pub struct Register<'a> {
    registry: &'a Registry,
    part: &'static str,
    described: RefCell<Vec<Described>>,
}

impl<'a> Register<'a> {
    /// For a part: `router` makes `pilotlight_router_…`.
    pub fn new(registry: &'a Registry, part: &'static str) -> Self {
        Register { registry, part, described: RefCell::default() }
    }

    /// What was registered, in this order.
    pub fn described(self) -> Vec<Described> {
        self.described.into_inner()
    }

    /// A counter.
    ///
    /// # Errors
    /// Like all of these: when the name is taken or cannot be one.
    pub fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.add(Kind::Counter, IntCounter::with_opts(self.opts(name, help))?)
    }

    /// Counters, parted by labels.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        self.add(Kind::Counter, IntCounterVec::new(self.opts(name, help), labels)?)
    }

    /// A gauge of whole things.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn count(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.add(Kind::Gauge, IntGauge::with_opts(self.opts(name, help))?)
    }

    /// A gauge.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn gauge(&self, name: &str, help: &str) -> Result<Gauge> {
        self.add(Kind::Gauge, Gauge::with_opts(self.opts(name, help))?)
    }

    /// Gauges, parted by labels.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec> {
        self.add(Kind::Gauge, GaugeVec::new(self.opts(name, help), labels)?)
    }

    /// A histogram.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram> {
        self.add(Kind::Histogram, Histogram::with_opts(self.buckets(name, help, buckets))?)
    }

    /// Histograms, parted by labels.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> Result<HistogramVec> {
        self.add(Kind::Histogram, HistogramVec::new(self.buckets(name, help, buckets), labels)?)
    }

    /// Counters parted by one label, whose values are known: each begins at zero, so that its first count is seen as a
    /// change.
    ///
    /// # Errors
    /// See [`Register::counter`].
    pub fn counters_of(&self, name: &str, help: &str, label: &str, values: &[&str]) -> Result<IntCounterVec> {
        let made = self.counters(name, help, &[label])?;
        for value in values {
            made.with_label_values(&[*value]);
        }
        Ok(made)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("pilotlight_{}_{name}", self.part), help)
    }

    fn buckets(&self, name: &str, help: &str, buckets: &[f64]) -> HistogramOpts {
        HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec())
    }

    fn add<C: Collector + Clone + 'static>(&self, kind: Kind, made: C) -> Result<C> {
        self.registry.register(Box::new(made.clone()))?;
        let described = made.desc().into_iter().map(|desc| Described {
            name: desc.fq_name.clone(),
            kind,
            labels: desc.variable_labels.clone(),
            help: desc.help.clone(),
        });
        self.described.borrow_mut().extend(described);
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_value_yet_is_described_too() {
        let registry = Registry::new();
        let register = Register::new(&registry, "part");
        register.counters("things_total", "Things", &["kind"]).unwrap();
        assert!(register.counter("things_total", "Again").is_err());
        assert!(registry.gather().is_empty());
        let described = register.described();
        assert_eq!(described.len(), 1);
        assert_eq!(described[0].name, "pilotlight_part_things_total");
        assert_eq!(
            (described[0].kind, described[0].labels.as_slice()),
            (Kind::Counter, &["kind".to_owned()][..])
        );
    }
}
