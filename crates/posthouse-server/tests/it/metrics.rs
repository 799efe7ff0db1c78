//! Metrics of a running server: as Prometheus and as a collector get them, and what dashboard, rules and documentation say of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::metrics::v1::{AggregationTemporality, metric::Data, number_data_point::Value as Number};
use prost::Message as _;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use serde_json::Value;

use crate::config::one;
use crate::support::{Dir, Receiver, Running, Schema, on_postgres, ph, posthouse, repository, run, unique, variable, wait_for};

fn read(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

/// What a collector was sent.
type Requests = Arc<Mutex<Vec<(HeaderMap, ExportMetricsServiceRequest)>>>;

/// A collector on a port of its own, or on a given one.
struct Collector {
    address: std::net::SocketAddr,
    requests: Requests,
    _runtime: tokio::runtime::Runtime,
}

impl Collector {
    fn start(address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let requests = Requests::default();
        let take = async |State(requests): State<Requests>, headers: HeaderMap, body: axum::body::Bytes| {
            let Ok(request) = ExportMetricsServiceRequest::decode(body) else { return StatusCode::BAD_REQUEST };
            requests.lock().unwrap().push((headers, request));
            StatusCode::OK
        };
        let app = Router::new().route("/otel/v1/metrics", axum::routing::post(take)).with_state(requests.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, requests, _runtime: runtime }
    }

    fn last(&self) -> Option<(HeaderMap, ExportMetricsServiceRequest)> {
        self.requests.lock().unwrap().last().cloned()
    }
}

/// A scrape: types by family, values by line without the value.
#[derive(Debug, Default)]
struct Scrape {
    types: BTreeMap<String, String>,
    values: BTreeMap<String, f64>,
}

impl Scrape {
    fn of(relay: &Running) -> Self {
        let (status, text) = relay.get("/metrics");
        assert_eq!(status, 200, "{text}");
        let mut out = Self::default();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(out.types.insert(name.into(), kind.into()), None, "{name} is there twice");
                assert!(text.contains(&format!("# HELP {name} ")), "{name} says what it is");
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').unwrap();
                out.values.insert(series.into(), value.parse().unwrap());
            }
        }
        out
    }

    /// The value of a series.
    fn value(&self, name: &str, labels: &str) -> Option<f64> {
        self.values.get(&format!("posthouse_{name}{{{labels}}}")).copied()
    }

    /// Every name that a query may use.
    fn names(&self) -> BTreeSet<String> {
        self.values.keys().map(|series| series.split('{').next().unwrap().to_owned()).collect()
    }
}

/// A topic with records, of which a group has committed some.
fn committed(brokers: &str, topic: &str, group: &str, offset: i64) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("group.id", group);
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, 0, Offset::Offset(offset)).unwrap();
    consumer.commit(&list, CommitMode::Sync).unwrap();
}

fn create_topic(brokers: &str, topic: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut config = ClientConfig::new();
        let admin: AdminClient<DefaultClientContext> = config.set("bootstrap.servers", brokers).create().unwrap();
        let new = NewTopic::new(topic, 1, TopicReplication::Fixed(1));
        let made = admin.create_topics([&new], &AdminOptions::new()).await.unwrap();
        made.into_iter().for_each(|made| drop(made.unwrap()));
    });
}

/// A server with something of everything: PostgreSQL, a receiver, one that is down, a queue, a topic, groups, adopted tables,
/// messages that consumers failed, and a collector.
struct World {
    schema: Schema,
    relay: Running,
    collector: Collector,
    queue: String,
    topic: String,
    group: String,
    _dir: Dir,
}

impl World {
    fn new() -> Self {
        let (dir, schema, receiver, collector) = (Dir::new(), Schema::new(), Receiver::start(), Collector::start("127.0.0.1:0"));
        let (amqp, brokers) = (variable("POSTHOUSE_TEST_RABBITMQ_URL"), variable("POSTHOUSE_TEST_KAFKA_URL"));
        let (queue, topic, group) = (unique("depth"), unique("lag"), unique("group"));
        create_topic(&brokers, &topic);
        let good = receiver.address;
        let to = collector.address;
        dir.write(
            "posthouse.toml",
            &schema.config(&format!(
                "[transports.http]\nallow = [\"127.0.0.1\"]\n\
                 [transports.amqp]\nkind = \"rabbitmq\"\nurl = {amqp:?}\nwatch = [\"no-such-queue\"]\n\
                 [transports.kafka]\nkind = \"kafka\"\nbrokers = {brokers:?}\nwatch = [{{ group = {group:?}, topics = [{topic:?}] }}]\n\
                 [routes.good]\nto = \"http://{good}/\"\n[routes.broken]\nto = \"http://127.0.0.1:9/\"\n\
                 [routes.queue]\nto = \"amqp:/{queue}\"\nrabbitmq = {{ declare = true }}\n\
                 [routes.topic]\nto = \"kafka:{topic}\"\n\
                 [[groups]]\nname = \"always\"\nhouses = \"0-2\"\n\
                 [[groups]]\nname = \"often\"\nhouses = \"3\"\ntrigger = {{ every = \"200ms\" }}\n\
                 [adopted.old]\ntable = \"old_outbox\"\nid = \"id\"\ndestination = \"good\"\npayload = {{ columns = [\"body\"] }}\n\
                 [adopted.old.state]\ncolumn = \"state\"\npending = [0]\nsent = 1\nfailed = 2\n\
                 [relay]\ninstance = \"relay-a\"\nfull_sweep = \"300ms\"\nnear_sweep = \"50ms\"\n\
                 [telemetry]\notlp_endpoint = \"http://{to}/otel\"\ninterval = \"1s\"\ntimeout = \"1s\"\n\
                 headers = {{ authorization = \"Bearer hunter2\" }}\nresource = {{ \"service.namespace\" = \"shop\" }}\n\
                 [server]\nlisten = \"127.0.0.1:0\"\n"
            )),
        );
        ph(&dir, &["migrate"]).code(0);
        let name = &schema.name;
        on_postgres(
            &schema.url,
            format!(
                "CREATE TABLE \"{name}\".old_outbox (id bigint PRIMARY KEY, state int NOT NULL, body text NOT NULL); \
                 CREATE INDEX ON \"{name}\".old_outbox (state, id); INSERT INTO \"{name}\".old_outbox VALUES (1, 0, 'x'); \
                 INSERT INTO \"{name}\".posthouse_inbox (consumer, message_id, status, next_attempt_at, first_at) VALUES \
                 ('stock', 'a', 'FAILED', '9999-12-31', clock_timestamp() - interval '1 hour'), \
                 ('stock', 'b', 'FAILED', '9999-12-31', clock_timestamp()), ('mail', 'a', 'PENDING_RETRY', clock_timestamp(), clock_timestamp())"
            ),
        );
        let relay = Running::start(&mut posthouse(&dir));
        relay.wait_ready();
        for (destination, n) in [("good", 3), ("queue", 2), ("topic", 3), ("broken", 1)] {
            for key in 0..n {
                ph(&dir, &["publish", destination, "{}", "--id", &format!("{destination}-{key}")]).code(0);
            }
        }
        // Only a look at 127.0.0.1 is allowed: this one is refused for good.
        ph(&dir, &["publish", "http://192.0.2.1/", "{}"]).code(0);
        Self { schema, relay, collector, queue, topic, group, _dir: dir }
    }

    /// Delivered to a receiver, a queue and a topic.
    const DELIVERED: f64 = 8.0;

    /// A scrape in which all has come to rest.
    fn settled(&self) -> Scrape {
        wait_for("everything is delivered", || {
            let scrape = Scrape::of(&self.relay);
            let delivered = scrape.value("attempts_total", "database=\"main\",outcome=\"delivered\"");
            let unavailable =
                scrape.value("destination_attempts_total", "database=\"main\",destination=\"broken\",outcome=\"unavailable\"");
            let sent = scrape.values.iter().find(|(name, _)| name.starts_with("posthouse_adopted_sent_total")).map(|(_, v)| *v);
            let done = delivered == Some(Self::DELIVERED) && unavailable.is_some_and(|n| n > 0.0) && sent == Some(1.0);
            (done && scrape.types.contains_key("posthouse_group_last_run_seconds")).then_some(())
        });
        committed(&variable("POSTHOUSE_TEST_KAFKA_URL"), &self.topic, &self.group, 1);
        let (queue, lag) = (self.queue(), self.lag());
        wait_for("what waits in brokers", || {
            let scrape = Scrape::of(&self.relay);
            (scrape.value("broker_messages", &queue) == Some(2.0) && scrape.value("broker_messages", &lag) == Some(2.0))
                .then_some(())
        });
        Scrape::of(&self.relay)
    }

    fn queue(&self) -> String {
        format!("group=\"\",kind=\"rabbitmq\",name=\"{}\",transport=\"amqp\"", self.queue)
    }

    fn lag(&self) -> String {
        format!("group=\"{}\",kind=\"kafka\",name=\"{}\",transport=\"kafka\"", self.group, self.topic)
    }
}

#[test]
fn one_server_tells_prometheus_a_collector_and_its_readers_the_same() {
    let w = World::new();
    let scrape = w.settled();
    numbers(&w, &scrape);
    documented(&scrape);
    dashboard(&scrape);
    rules(&scrape);
    collected(&w, &scrape);
    let schema = w.schema.name.clone();
    w.relay.signal("TERM");
    let before = w.collector.requests.lock().unwrap().len();
    let (code, log) = w.relay.ended();
    assert_eq!(code, 0, "{log}");
    assert!(w.collector.requests.lock().unwrap().len() > before, "the last figures are sent at the end");
    assert!(!log.contains("hunter2"), "{schema}: {log}");
    let told = log.lines().filter(|l| l.contains("can't be told") && l.contains("no-such-queue")).count();
    assert_eq!(told, 1, "what can't be looked at is warned about once: {log}");
}

/// The numbers are what happened.
fn numbers(w: &World, scrape: &Scrape) {
    let value = |name: &str, labels: &str| {
        scrape.value(name, labels).unwrap_or_else(|| panic!("{name}{{{labels}}} is not in {:#?}", scrape.values))
    };
    let main = "database=\"main\"";
    assert_eq!(value("attempts_total", "database=\"main\",outcome=\"rejected\""), 1.0);
    assert_eq!(value("tried_messages_total", "attempt=\"1\",database=\"main\""), World::DELIVERED + 1.0);
    for (destination, n) in [("good", 3.0), ("queue", 2.0), ("topic", 3.0), ("broken", 0.0)] {
        let labels = format!("database=\"main\",destination=\"{destination}\",outcome=\"delivered\"");
        assert_eq!(value("destination_attempts_total", &labels), n, "{destination}");
    }
    let buckets: Vec<f64> = {
        let of = |bound: &Duration| format!("database=\"main\",le=\"{}\"", bound.as_secs_f64());
        posthouse::Histogram::BOUNDS.iter().map(|b| value("delivery_latency_seconds_bucket", &of(b))).collect()
    };
    assert!(buckets.is_sorted(), "{buckets:?}");
    for (name, n) in [("delivery_latency_seconds", World::DELIVERED), ("attempt_duration_seconds", World::DELIVERED + 1.0)] {
        assert_eq!(value(&format!("{name}_count"), main), n, "{name}");
        assert_eq!(value(&format!("{name}_bucket"), "database=\"main\",le=\"+Inf\""), n, "{name}");
        assert!(value(&format!("{name}_sum"), main) > 0.0, "{name}");
    }
    let sweeps = |sweep: &str| value("sweep_duration_seconds_count", &format!("database=\"main\",sweep=\"{sweep}\""));
    assert!(sweeps("full") > 0.0);
    assert!(value("pool_connections_max", main) >= value("pool_connections", "database=\"main\",state=\"in_use\""));
    let inbox = |name: &str, consumer: &str, status: &str| {
        value(name, &format!("consumer=\"{consumer}\",database=\"main\",status=\"{status}\""))
    };
    assert_eq!(inbox("inbox_backlog_messages", "stock", "FAILED"), 2.0);
    assert_eq!(inbox("inbox_backlog_messages", "mail", "PENDING_RETRY"), 1.0);
    let oldest = inbox("inbox_backlog_oldest_seconds", "stock", "FAILED");
    assert!((3_600.0..3_900.0).contains(&oldest), "by the database's clock: {oldest}");
    assert_eq!((value("broker_watch_up", &w.queue()), value("broker_consumers", &w.queue())), (1.0, 0.0));
    assert_eq!(value("broker_watch_up", &w.lag()), 1.0);
    let missing = "group=\"\",kind=\"rabbitmq\",name=\"no-such-queue\",transport=\"amqp\"";
    assert_eq!((value("broker_watch_up", missing), scrape.value("broker_messages", missing)), (0.0, None));
}

/// The documentation lists exactly what there is.
fn documented(scrape: &Scrape) {
    let text = read("docs/metrics.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `posthouse_"));
    let listed: BTreeMap<String, String> = rows
        .map(|row| {
            let cells: Vec<&str> = row.split(" | ").collect();
            (format!("posthouse_{}", cells[0].trim_end_matches('`')), cells[1].to_owned())
        })
        .collect();
    assert_eq!(listed, scrape.types);
}

/// Names of metrics in a query: those that begin as ours do and are no label.
fn used(query: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    query.split(|c| !word(c)).filter(|w| w.starts_with("posthouse_")).map(str::to_owned).collect()
}

/// Runs promtool, which must be there: a check that is left out proves nothing.
fn promtool(args: &[&str], dir: &Path) {
    let ours = repository("target/services/tools/promtool");
    let program = std::env::var_os("POSTHOUSE_PROMTOOL").map(PathBuf::from);
    let program = program.unwrap_or_else(|| if ours.exists() { ours } else { "promtool".into() });
    let out = Command::new(&program).args(args).current_dir(dir).output().unwrap_or_else(|e| {
        panic!("{}: {e}; run scripts/services build-tools, or set POSTHOUSE_PROMTOOL", program.display());
    });
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "promtool {args:?}: {stdout}{stderr}");
}

fn values<'v>(value: &'v Value, key: &str, out: &mut Vec<&'v Value>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, inner)| {
            if name == key {
                out.push(inner);
            }
            values(inner, key, out);
        }),
        Value::Array(items) => items.iter().for_each(|inner| values(inner, key, out)),
        _ => {}
    }
}

/// The dashboard asks only for what there is, in queries that Prometheus takes, of whatever data source is chosen.
fn dashboard(scrape: &Scrape) {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/posthouse.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "no id is there twice");
    let mut sources = Vec::new();
    values(&dashboard, "uid", &mut sources);
    for uid in sources {
        let uid = uid.as_str().unwrap();
        assert!(["${datasource}", "-- Grafana --", "posthouse"].contains(&uid), "{uid} is a data source of one installation");
    }
    let variables: BTreeSet<&str> =
        dashboard["templating"]["list"].as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap()).collect();
    let mut queries = Vec::new();
    values(&dashboard, "expr", &mut queries);
    values(&dashboard, "definition", &mut queries);
    assert!(queries.len() > 50, "{}", queries.len());
    let names = scrape.names();
    let mut checked = String::from("groups:\n  - name: dashboard\n    rules:\n");
    for (n, query) in queries.into_iter().enumerate() {
        let query = query.as_str().unwrap();
        let used = used(query);
        assert!(!used.is_empty() && used.is_subset(&names), "{query}: there is no {:?}", used.difference(&names));
        for variable in query.split('$').skip(1) {
            let name: String = variable.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            assert!(name == "__rate_interval" || variables.contains(name.as_str()), "{query}: no variable {name}");
        }
        if !query.starts_with("label_values") {
            let query = query.replace("$__rate_interval", "5m");
            checked += &format!("      - record: panel:{n}\n        expr: {}\n", serde_json::to_string(&query).unwrap());
        }
    }
    let dir = Dir::new();
    dir.write("panels.yml", &checked);
    promtool(&["check", "rules", "panels.yml"], dir.path());
    let boxes: Vec<[u64; 4]> =
        panels.iter().map(|p| ["x", "y", "w", "h"].map(|key| p["gridPos"][key].as_u64().unwrap())).collect();
    for (n, [x, y, w, h]) in boxes.iter().enumerate() {
        assert!(x + w <= 24, "panel {n} is too wide");
        let over = |[x2, y2, w2, h2]: &[u64; 4]| x < &(x2 + w2) && x2 < &(x + w) && y < &(y2 + h2) && y2 < &(y + h);
        assert!(!boxes[n + 1..].iter().any(over), "panel {n} lies over another");
    }
}

/// The rules are well-formed, fire when they should, and ask only for what there is.
fn rules(scrape: &Scrape) {
    let dir = repository("deploy/prometheus");
    promtool(&["check", "rules", "rules.yml"], &dir);
    promtool(&["check", "config", "prometheus.yml"], &dir);
    promtool(&["test", "rules", "rules_test.yml"], &dir);
    let text = read("deploy/prometheus/rules.yml");
    let (used, names) = (used(&text), scrape.names());
    assert!(used.len() > 15 && used.is_subset(&names), "there is no {:?}", used.difference(&names));
    let recorded: BTreeSet<&str> = text.lines().filter_map(|l| l.trim().strip_prefix("- record: ")).collect();
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let asked = text.split(|c| !word(c)).filter(|w| w.starts_with("posthouse:"));
    asked.for_each(|name| assert!(recorded.contains(name), "{name} is recorded by no rule"));
    let tests = read("deploy/prometheus/rules_test.yml");
    for alert in text.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname: {alert}\n")), "{alert} is tested");
    }
}

/// The collector gets the same names, kinds and values.
fn collected(w: &World, scrape: &Scrape) {
    let sum = |request: &ExportMetricsServiceRequest, name: &str| -> Option<f64> {
        let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
        match metrics.iter().find(|m| m.name == name)?.data.as_ref()? {
            Data::Sum(sum) => {
                Some(sum.data_points.iter().map(|p| if let Some(Number::AsDouble(n)) = p.value { n } else { 0.0 }).sum())
            }
            _ => None,
        }
    };
    let (headers, request) = wait_for("a request that tells of all deliveries", || {
        w.collector.last().filter(|(_, request)| {
            let names = request.resource_metrics[0].scope_metrics[0].metrics.len();
            sum(request, "posthouse_delivered_total") == Some(World::DELIVERED) && names == scrape.types.len()
        })
    });
    assert_eq!(headers["authorization"], "Bearer hunter2");
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let resource = request.resource_metrics[0].resource.as_ref().unwrap();
    let attributes: BTreeMap<&str, &str> = resource
        .attributes
        .iter()
        .map(|a| match a.value.as_ref().and_then(|v| v.value.as_ref()) {
            Some(Any::StringValue(value)) => (a.key.as_str(), value.as_str()),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        ("service.instance.id", "relay-a"),
        ("service.name", "posthouse"),
        ("service.namespace", "shop"),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ];
    assert_eq!(attributes, BTreeMap::from(expected));
    let mut types = BTreeMap::new();
    for metric in &request.resource_metrics[0].scope_metrics[0].metrics {
        let unit = if metric.name.contains("_seconds") {
            "s"
        } else if metric.name.ends_with("_bytes") {
            "By"
        } else {
            ""
        };
        assert_eq!(metric.unit, unit, "{}", metric.name);
        assert!(!metric.description.is_empty(), "{}", metric.name);
        let kind = match metric.data.as_ref().unwrap() {
            Data::Gauge(_) => "gauge",
            Data::Sum(sum) => {
                assert!(sum.is_monotonic && sum.aggregation_temporality() == AggregationTemporality::Cumulative);
                assert!(sum.data_points.iter().all(|p| p.start_time_unix_nano > 0 && p.start_time_unix_nano < p.time_unix_nano));
                "counter"
            }
            Data::Histogram(histogram) => {
                assert_eq!(histogram.aggregation_temporality(), AggregationTemporality::Cumulative);
                for point in &histogram.data_points {
                    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count, "{}", metric.name);
                }
                if metric.name == "posthouse_delivery_latency_seconds" {
                    assert_eq!(histogram.data_points[0].count as f64, World::DELIVERED);
                    let sum = scrape.value("delivery_latency_seconds_sum", "database=\"main\"");
                    assert_eq!(histogram.data_points[0].sum, sum);
                    assert_eq!(histogram.data_points[0].attributes[0].key, "database");
                }
                "histogram"
            }
            other => panic!("{other:?}"),
        };
        types.insert(metric.name.clone(), kind.to_owned());
    }
    assert_eq!(types, scrape.types);
}

#[test]
fn a_collector_that_is_away_costs_one_warning() {
    let dir = Dir::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let text = format!(
        "[databases.main]\nurl = \"sqlite:{}\"\n[telemetry]\notlp_endpoint = \"http://{free}/otel\"\ninterval = \"1s\"\ntimeout = \"1s\"\n\
         headers = {{ authorization = \"hunter2\" }}\n[server]\nlisten = \"127.0.0.1:0\"\n",
        dir.path().join("a.db").display()
    );
    dir.write("posthouse.toml", &text);
    ph(&dir, &["migrate"]).code(0);
    let relay = Running::start(posthouse(&dir).env("RUST_LOG", "info,posthouse=debug"));
    relay.wait_ready();
    let told = |level: &str| {
        relay.log().lines().filter(|l| l.contains(level) && l.contains("could not be sent to the collector")).count()
    };
    wait_for("a second try", || (told("DEBUG") > 0).then_some(()));
    assert_eq!(told("WARN"), 1, "{}", relay.log());
    assert_eq!(relay.get("/readyz").0, 200, "the relay does its work");
    let collector = Collector::start(&free.to_string());
    wait_for("its figures", || collector.last());
    wait_for("that it is told", || relay.log().contains("the collector takes metrics again").then_some(()));
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

#[test]
fn what_is_watched_and_where_metrics_go_is_checked() {
    let amqp = "[transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:hunter2@mq/v\"\n";
    one(&format!("{amqp}watch = \"q\""), "transports.amqp.watch", &["must be a list of texts"]);
    one(&format!("{amqp}watch = [\"\"]"), "transports.amqp.watch[0]", &["empty name"]);
    let kafka = "[transports.kafka]\nkind = \"kafka\"\nbrokers = \"k:9092\"\n";
    one(&format!("{kafka}watch = [\"t\"]"), "transports.kafka.watch", &["must be tables", "group, topics"]);
    one(&format!("{kafka}watch = [{{ group = \"g\" }}]"), "transports.kafka.watch[0].topics", &["is missing", "topics = ["]);
    one(&format!("{kafka}watch = [{{ topics = [\"t\"] }}]"), "transports.kafka.watch[0].group", &["is missing"]);
    one(
        &format!("{kafka}watch = [{{ group = \"g\", topic = [\"t\"] }}]"),
        "transports.kafka.watch[0].topic",
        &["did you mean", "topics"],
    );
    let nats = "[transports.nats]\nkind = \"nats\"\nurl = \"nats://n\"\n";
    one(&format!("{nats}watch = [{{ stream = \"S\", consumers = [] }}]"), "transports.nats.watch[0].consumers", &["is missing"]);

    let telemetry = "[telemetry]\notlp_endpoint = \"http://c:4318\"\n";
    one("[telemetry]\ninterval = \"1m\"", "telemetry.otlp_endpoint", &["is missing", "4318"]);
    one("[telemetry]\notlp_endpoint = \"collector\"", "telemetry.otlp_endpoint", &["is no complete http"]);
    one("[telemetry]\notlp_endpoint = \"http://c:4317\"", "telemetry.otlp_endpoint", &["gRPC", "4318"]);
    one(&format!("{telemetry}interval = \"500ms\""), "telemetry.interval", &["must be 1s to 1h"]);
    one(&format!("{telemetry}interval = \"2s\"\ntimeout = \"3s\""), "telemetry.timeout", &["not be longer than interval"]);
    one(&format!("{telemetry}headers = {{ \"a b\" = \"hunter2\" }}"), "telemetry.headers.\"a b\"", &["[redacted]", "no name"]);
    one(&format!("{telemetry}headers = {{ a = \"hunter2\\n\" }}"), "telemetry.headers.a", &["[redacted]", "characters"]);

    let dir = Dir::new();
    dir.write(
        "posthouse.toml",
        &format!(
            "[databases.a]\nurl = \"sqlite:a.db\"\n{amqp}watch = [\"other\"]\n{kafka}watch = [{{ group = \"g\", topics = [\"t\", \"u\"] }}]\n\
             [routes.declared]\nto = \"amqp:x/y\"\nrabbitmq = {{ declare = true, queue = \"made\" }}\n[routes.straight]\nto = \"amqp:/straight\"\n\
             [routes.elsewhere]\nto = \"amqp:x/z\"\n{telemetry}headers = {{ authorization = \"hunter2\" }}\n"
        ),
    );
    let shown = run(posthouse(&dir).args(["relay", "--print-config", "--json"])).code(0);
    assert!(!shown.stdout.contains("hunter2"), "{}", shown.stdout);
    let shown = shown.json();
    let watched = serde_json::json!(["made", "other", "straight"]);
    assert_eq!(shown["transports"]["amqp"]["watch"], watched, "queues that routes name are watched too");
    let lags = serde_json::json!([{ "group": "g", "topics": ["t"] }, { "group": "g", "topics": ["u"] }]);
    assert_eq!(shown["transports"]["kafka"]["watch"], lags);
    let telemetry = &shown["telemetry"];
    assert_eq!((&telemetry["interval"], &telemetry["headers"]["authorization"]), (&"30s".into(), &"[redacted]".into()));
}
