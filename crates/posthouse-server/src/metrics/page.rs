//! Makes families of metrics out of snapshots.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use posthouse::Histogram;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Histogram as Counted, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry};

/// A fresh registry, filled from snapshots.
pub(super) struct Page {
    registry: Registry,
}

impl Page {
    pub(super) fn new() -> Self {
        Self { registry: Registry::new() }
    }

    pub(super) fn counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        let made = IntCounterVec::new(Opts::new(format!("posthouse_{name}"), help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    pub(super) fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        let made = GaugeVec::new(Opts::new(format!("posthouse_{name}"), help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    pub(super) fn histogram(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<Histograms> {
        let names = labels.iter().map(|label| (*label).to_owned()).collect();
        let desc = Desc::new(format!("posthouse_{name}"), help.to_owned(), names, HashMap::new())?;
        let made = Histograms { desc, metrics: Arc::default() };
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    /// What there is, by name. A family of which there is nothing is left out.
    pub(super) fn families(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}

/// Histograms that were counted elsewhere; those of the crate count themselves.
#[derive(Clone)]
pub(super) struct Histograms {
    desc: Desc,
    metrics: Arc<Mutex<Vec<Metric>>>,
}

impl Histograms {
    /// Adds one; `labels` are the values in the order of their names.
    pub(super) fn add(&self, labels: &[&str], histogram: &Histogram) {
        let mut out = Counted::default();
        let mut below = 0;
        let bounds = Histogram::BOUNDS.iter().map(|bound| bound.as_secs_f64());
        let buckets = bounds.zip(histogram.counts()).map(|(bound, count)| {
            below += count;
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(bound);
            bucket.set_cumulative_count(below);
            bucket
        });
        out.set_bucket(buckets.collect());
        out.set_sample_count(histogram.count());
        out.set_sample_sum(histogram.sum().as_secs_f64());
        let pairs = self.desc.variable_labels.iter().zip(labels).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.clone());
            pair.set_value((*value).to_owned());
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        metric.set_histogram(out);
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner).push(metric);
    }
}

impl Collector for Histograms {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone());
        vec![family]
    }
}
