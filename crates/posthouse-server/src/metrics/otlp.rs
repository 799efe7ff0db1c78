//! The same metrics to an OpenTelemetry collector, by OTLP over HTTP with protobuf.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum,
    metric, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prometheus::proto::{LabelPair, MetricFamily, MetricType};
use prost::Message;
use reqwest::{Client, header, redirect};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use url::Url;

use crate::config::{TelemetryConfig, redact_url};
use crate::failure::Failure;
use crate::http::Served;

/// How long the last figures may take at the end.
const LAST: Duration = Duration::from_secs(2);

/// Sends them now and then, and once more at the end.
pub(crate) struct Otlp {
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Otlp {
    /// None where it isn't configured.
    pub(crate) fn start(served: &Arc<Served>) -> Result<Option<Self>, Failure> {
        let Some(settings) = &served.config.telemetry else { return Ok(None) };
        let sender = Sender::new(settings, served)?;
        let (end, ended) = oneshot::channel();
        let task = tokio::spawn(sender.run(settings.interval, served.clone(), ended));
        Ok(Some(Self { end, task }))
    }

    /// Sends the last figures.
    pub(crate) async fn stop(self) {
        // The receiver is gone only when the task has ended by itself.
        let _ = self.end.send(());
        let mut task = self.task;
        if tokio::time::timeout(LAST, &mut task).await.is_err() {
            task.abort();
        }
    }
}

struct Sender {
    client: Client,
    to: Url,
    resource: Resource,
    started: u64,
    /// The last time it did not work.
    failing: bool,
}

impl Sender {
    fn new(settings: &TelemetryConfig, served: &Served) -> Result<Self, Failure> {
        let client = Client::builder()
            .user_agent(concat!("posthouse/", env!("CARGO_PKG_VERSION")))
            // What the headers say is for this address alone.
            .redirect(redirect::Policy::none())
            .no_proxy()
            .timeout(settings.timeout)
            .default_headers(settings.headers.clone())
            .build()
            .map_err(|e| Failure::not_so(format!("telemetry: no HTTP client can be made: {}", cause(&e))))?;
        let mut to = settings.endpoint.clone();
        let path = format!("{}/v1/metrics", to.path().trim_end_matches('/'));
        to.set_path(&path);
        Ok(Self { client, to, resource: resource(settings, served), started: nanos(SystemTime::now()), failing: false })
    }

    async fn run(mut self, interval: Duration, served: Arc<Served>, mut ended: oneshot::Receiver<()>) {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let last = tokio::select! {
                _ = ticks.tick() => false,
                _ = &mut ended => true,
            };
            let result = self.send(&served).await;
            self.told(result);
            if last {
                return;
            }
        }
    }

    async fn send(&self, served: &Served) -> Result<(), String> {
        let families = super::families(served).await.map_err(|e| e.to_string())?;
        let body = request(&families, &self.resource, self.started, nanos(SystemTime::now())).encode_to_vec();
        let sent = self.client.post(self.to.clone()).header(header::CONTENT_TYPE, "application/x-protobuf").body(body).send();
        let answer = sent.await.map_err(|e| cause(&e))?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(format!("it answered {status}")) }
    }

    /// An outage is told once, and its end.
    fn told(&mut self, result: Result<(), String>) {
        let to = redact_url(self.to.as_str());
        match result {
            Ok(()) if self.failing => {
                tracing::info!(to, "the collector takes metrics again");
                self.failing = false;
            }
            Err(error) if !self.failing => {
                tracing::warn!(to, error, "metrics could not be sent to the collector; they are sent again at the next interval");
                self.failing = true;
            }
            Err(error) => tracing::debug!(to, error, "metrics could not be sent to the collector"),
            Ok(()) => {}
        }
    }
}

/// Why a request came to nothing, without the address.
fn cause(e: &reqwest::Error) -> String {
    if e.is_timeout() {
        return "no answer within telemetry.timeout".into();
    }
    let mut last: &dyn std::error::Error = e;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

fn nanos(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

/// Who sends: what the configuration says, and what it leaves out.
fn resource(settings: &TelemetryConfig, served: &Served) -> Resource {
    let instance = served.config.relay.instance.clone();
    let instance = instance.or_else(|| Some(format!("{}-{}", whoami::hostname().ok()?, std::process::id())));
    let usual = [
        ("service.name", "posthouse".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", instance.unwrap_or_else(|| std::process::id().to_string())),
    ];
    let usual = usual.iter().filter(|(key, _)| !settings.resource.contains_key(*key)).map(|(key, value)| attribute(key, value));
    let attributes = usual.chain(settings.resource.iter().map(|(key, value)| attribute(key, value))).collect();
    Resource { attributes, ..Resource::default() }
}

fn request(families: &[MetricFamily], resource: &Resource, started: u64, now: u64) -> ExportMetricsServiceRequest {
    let scope = InstrumentationScope {
        name: "posthouse".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..InstrumentationScope::default()
    };
    let metrics = families.iter().filter_map(|family| metric(family, started, now)).collect();
    let scope = ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() };
    let all = ResourceMetrics { resource: Some(resource.clone()), scope_metrics: vec![scope], ..ResourceMetrics::default() };
    ExportMetricsServiceRequest { resource_metrics: vec![all] }
}

/// The unit that the name of a metric ends with.
fn unit(name: &str) -> &'static str {
    match name.trim_end_matches("_total") {
        name if name.ends_with("_seconds") || name.ends_with("_seconds_left") => "s",
        name if name.ends_with("_bytes") => "By",
        _ => "",
    }
}

/// One family. Counters and histograms count from the start of this process.
fn metric(family: &MetricFamily, started: u64, now: u64) -> Option<Metric> {
    let cumulative = AggregationTemporality::Cumulative.into();
    let data = match family.get_field_type() {
        MetricType::COUNTER => metric::Data::Sum(Sum {
            data_points: numbers(family, started, now, |m| m.get_counter().get_value()),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        MetricType::GAUGE => metric::Data::Gauge(Gauge { data_points: numbers(family, 0, now, |m| m.get_gauge().get_value()) }),
        MetricType::HISTOGRAM => metric::Data::Histogram(Histogram {
            data_points: family.get_metric().iter().map(|m| histogram(m, started, now)).collect(),
            aggregation_temporality: cumulative,
        }),
        // There are none.
        MetricType::SUMMARY | MetricType::UNTYPED => return None,
    };
    Some(Metric {
        name: family.name().to_owned(),
        description: family.help().to_owned(),
        unit: unit(family.name()).to_owned(),
        data: Some(data),
        ..Metric::default()
    })
}

fn attributes(labels: &[LabelPair]) -> Vec<KeyValue> {
    labels.iter().map(|label| attribute(label.name(), label.value())).collect()
}

fn numbers(family: &MetricFamily, started: u64, now: u64, value: fn(&prometheus::proto::Metric) -> f64) -> Vec<NumberDataPoint> {
    let point = |m| NumberDataPoint {
        attributes: attributes(prometheus::proto::Metric::get_label(m)),
        start_time_unix_nano: started,
        time_unix_nano: now,
        value: Some(number_data_point::Value::AsDouble(value(m))),
        ..NumberDataPoint::default()
    };
    family.get_metric().iter().map(point).collect()
}

fn histogram(m: &prometheus::proto::Metric, started: u64, now: u64) -> HistogramDataPoint {
    let h = m.get_histogram();
    // Here each bucket counts for itself, and the last one is for what is longer than all bounds.
    let mut below = 0;
    let mut counts: Vec<u64> = Vec::new();
    for bucket in h.get_bucket() {
        counts.push(bucket.cumulative_count() - below);
        below = bucket.cumulative_count();
    }
    counts.push(h.get_sample_count() - below);
    HistogramDataPoint {
        attributes: attributes(m.get_label()),
        start_time_unix_nano: started,
        time_unix_nano: now,
        count: h.get_sample_count(),
        sum: Some(h.get_sample_sum()),
        bucket_counts: counts,
        explicit_bounds: h.get_bucket().iter().map(|bucket| bucket.upper_bound()).collect(),
        ..HistogramDataPoint::default()
    }
}
