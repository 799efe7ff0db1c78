//! Every key of the file: what it may hold, what it is for, and its limits. The walk checks a file by these lists; `posthouse config` and
//! the reference in the documentation are made of them.
//!
//! Of each key: name, shape, meaning, limits. What is said is Markdown. Limits that begin with "A to B", "at least A" or "at most B" are
//! tried out by a test (`reference.rs`): what lies beyond them must be refused.

use super::shape::Shape;

/// Name, shape, meaning, limits.
pub(super) type Key = (&'static str, Shape, &'static str, &'static str);
pub(super) type Keys = &'static [Key];

const U32: Shape = Shape::Whole(0, u32::MAX as i64);
const SIZE: Shape = Shape::Whole(0, i64::MAX);

const RETRY: Keys = &[
    ("max_attempts", U32, "Failed attempts until a message is FAILED. A message's own `max_attempts` goes first.", "1 to 10000"),
    ("base", Shape::Duration, "Wait after the first failure.", "more than 0s, at most `cap`"),
    ("factor", Shape::Number, "Each wait is this many times the one before.", "1 to 100"),
    ("cap", Shape::Duration, "Longest wait.", "at most 30days"),
];
const HTTP_ROUTE: Keys = &[
    ("method", Shape::Text, "Request method.", ""),
    ("content_type", Shape::Text, "Instead of the message's own.", "not together with structured CloudEvents"),
    ("authorization", Shape::Secret, "Value of the header `Authorization`.", ""),
    ("headers", Shape::Named(&Shape::Secret), "Headers of each request.", ""),
    (
        "signing_keys",
        Shape::Secrets,
        "Keys that sign each request as Standard Webhooks describes. With two, both sign, so that a receiver can change from one to \
         the other.",
        "at most 5; each `whsec_` and the Base64 of 24 to 64 bytes",
    ),
];
const CLOUDEVENTS: Keys = &[
    (
        "mode",
        Shape::OneOf(&["binary", "structured"]),
        "`binary`: attributes in headers, the payload as it is. `structured`: one JSON document.",
        "",
    ),
    ("source", Shape::Text, "The attribute `source`.", "a URI or a path, 1 to 255 bytes"),
    ("default_type", Shape::Text, "The attribute `type` of messages that have none.", "text of 1 to 255 bytes"),
];
const RABBITMQ_ROUTE: Keys = &[
    ("persistent", Shape::Bool, "Messages survive a restart of the broker in durable queues.", ""),
    (
        "priority",
        Shape::Whole(0, u8::MAX as i64),
        "For queues with `x-max-priority`. A message's header `amqp-priority` goes first.",
        "0 to 255",
    ),
    (
        "expiration",
        Shape::Duration,
        "The broker drops the message from its queue after this time. A message's header `amqp-expiration` (milliseconds) goes first.",
        "at most 4294967295ms",
    ),
    ("app_id", Shape::Text, "The property `app_id`.", "text of 1 to 255 bytes"),
    ("headers", Shape::Named(&Shape::Any), "Headers of each message; numbers, lists and tables keep their types.", ""),
    (
        "declare",
        Shape::Bool,
        "Make the exchange or the queue that the address names, durable, when a connection is made. Without it, what isn't there is \
         an error.",
        "",
    ),
    ("exchange_type", Shape::OneOf(&["topic", "direct", "fanout", "headers"]), "Of a declared exchange.", ""),
    ("queue", Shape::Text, "With `declare`: a durable queue to make too, and to bind to the exchange by the routing key.", ""),
    ("queue_type", Shape::OneOf(&["classic", "quorum"]), "Of a declared queue.", ""),
];
pub(super) const ROUTE: Keys = &[
    (
        "to",
        Shape::Url,
        "`transport:address`, where messages for this name go. Needed unless the name is an address itself.",
        "an address of a configured transport, in the form that it takes",
    ),
    ("retry", Shape::Table(RETRY), "When and how often to try again.", ""),
    (
        "ordering",
        Shape::OneOf(&["strict", "pipelined", "none"]),
        "`strict`: messages of a key go one after the other. `pipelined`: one behind the other without waiting for confirmations, \
         and none overtakes one that failed. `none`: nothing waits.",
        "`pipelined` only to a transport that can do it (Kafka)",
    ),
    (
        "on_exhausted",
        Shape::OneOf(&["block", "skip"]),
        "What a FAILED message does to later ones of its key. `block`: they wait until a person requeues or skips it. `skip`: they \
         go on.",
        "",
    ),
    (
        "concurrency",
        U32,
        "Messages in flight to this destination, per instance. Without it, what suits the transport: 32 for HTTP, more for brokers.",
        "1 to 10000",
    ),
    ("rate", Shape::Number, "Sends per second, per instance. Without it, as fast as it goes.", "more than 0"),
    ("cloudevents", Shape::Table(CLOUDEVENTS), "Send as CloudEvents 1.0. Without it, the payload as it is.", ""),
    ("http", Shape::Table(HTTP_ROUTE), "How a transport of kind `http` makes the request.", ""),
    ("rabbitmq", Shape::Table(RABBITMQ_ROUTE), "Message properties and topology, for a transport of kind `rabbitmq`.", ""),
];
const RELAY: Keys = &[
    (
        "instance",
        Shape::Text,
        "Name in tables and logs; a random ending is added. Without it, host name and process id.",
        "text of 1 to 100 bytes, no control characters",
    ),
    (
        "lease",
        Shape::Duration,
        "How long houses stay an instance's own after its last heartbeat. After a crash others go on after this time.",
        "at most 1h",
    ),
    ("heartbeat", Shape::Duration, "How often the lease is renewed.", "more than 0s, at most a third of `lease`"),
    (
        "send_timeout",
        Shape::Duration,
        "Deadline of one send, response included.",
        "`send_timeout` + `lease_margin` + `heartbeat` at most `lease`",
    ),
    ("lease_margin", Shape::Duration, "What must be left of the lease beyond `send_timeout` for a send to start.", "see above"),
    ("idle_poll", Shape::Duration, "Longest time between two reads when nothing wakes the relay.", "1ms to 1h"),
    ("near_sweep", Shape::Duration, "How often recent ids are read again for transactions that committed late.", "1ms to 1h"),
    (
        "full_sweep",
        Shape::Duration,
        "How often the whole pending set is read; stretched so that it takes less than 2 % of the time.",
        "1ms to 1h",
    ),
    ("database_timeout", Shape::Duration, "Deadline of one database call.", "at least 100ms"),
    (
        "batch",
        U32,
        "Most rows per read. Up to four times as many are in memory, six times where slow receivers fill that.",
        "1 to 5000",
    ),
    ("memory", SIZE, "Most bytes of payloads in memory. A larger message is sent alone.", "at least 1048576"),
    ("max_claims", U32, "A message is FAILED after this many marked tries during which the process died.", "1 to 100"),
    ("runs_retention", Shape::Duration, "How long runs of groups stay in the table of runs.", "at least 1m"),
    (
        "default_route",
        Shape::Table(ROUTE),
        "Settings of destinations without a route: such a destination is itself an address. The keys of a route, but for `to`.",
        "`ordering` not `pipelined`",
    ),
];
const TRIGGER: Keys = &[
    ("every", Shape::Duration, "This long after the end of the run before, on each instance.", "100ms to 366days"),
    ("rate", Shape::Duration, "This often, from start to start, on all instances at once.", "100ms to 366days"),
    (
        "cron",
        Shape::Text,
        "At these times: second, minute, hour, day, month, day of the week.",
        "an expression that comes at all",
    ),
    ("tz", Shape::Text, "The time zone of `cron`, such as `Asia/Shanghai`; UTC without it.", "a zone of the system's database"),
];
const GROUP: Keys = &[
    (
        "name",
        Shape::Text,
        "As commands, metrics and the table of runs know it. Needed where there are several.",
        "text of 1 to 64 bytes",
    ),
    ("databases", Shape::Texts, "Names of databases it works on; all when empty.", ""),
    (
        "tables",
        Shape::Texts,
        "Prefixes of Posthouse's own tables it works on, all when empty; names of `[adopted.NAME]` mappings that it scans.",
        "",
    ),
    (
        "houses",
        Shape::Text,
        "`all`, or numbers and ranges: `0-31,40`.",
        "houses that the database has, and none of another group of the same tables",
    ),
    (
        "trigger",
        Shape::WordOr(&["continuous", "manual", "external"], TRIGGER),
        "When it runs. `continuous`: it is sent from all the time. `manual`: when somebody asks. `external`: when a scheduler \
         outside asks.",
        "",
    ),
    ("limit", SIZE, "Messages that one run takes up.", "at least 1; not of continuous groups"),
    ("concurrency", U32, "Messages in flight from one instance, all destinations together.", "1 to 10000"),
    (
        "budget",
        Shape::Duration,
        "How long a run may take. Then it takes up nothing more, finishes what is in flight, and is `TIMEOUT`.",
        "at least 100ms; not of continuous groups",
    ),
    (
        "when_busy",
        Shape::OneOf(&["serial", "discard", "cover"]),
        "What happens when a run is due while one is going. `serial`: it waits. `discard`: it doesn't take place. `cover`: the one \
         that is going is stopped.",
        "",
    ),
    (
        "misfire",
        Shape::OneOf(&["skip", "once"]),
        "What happens to times at which nobody was there. `skip`: they are left out. `once`: one run makes up for all of them.",
        "",
    ),
    (
        "retries",
        U32,
        "How often a run that ended with an error is tried again, 1 s after its end, then 2 s, 4 s, …",
        "at most 10; not of continuous and external groups",
    ),
    (
        "then",
        Shape::Text,
        "The group that runs after a run of this one that is `DONE`.",
        "not a continuous or external group; no circle",
    ),
];
const ALERT: Keys = &[
    ("rule", Shape::Text, "What it is about: one of the rules in [alerts.md](alerts.md#rules).", ""),
    ("name", Shape::Text, "By which it is known. Without it the entry changes the default of its rule.", "text of 1 to 64 bytes"),
    ("enabled", Shape::Bool, "`false` turns it off.", ""),
    (
        "threshold",
        Shape::Amount,
        "Fires from here on: a number, a share of 0 to 1, or a time, as the rule has it.",
        "more than 0",
    ),
    (
        "recover",
        Shape::Amount,
        "It is over below this. Without it 80 % of `threshold`; of rules that fire below it, `threshold`.",
        "on the good side of `threshold`",
    ),
    ("interval", Shape::Duration, "How often it is looked at.", "100ms to 1h"),
    ("for", Shape::Duration, "How long it must be so before it fires.", "at most 30days"),
    (
        "repeat",
        Shape::Duration,
        "How often people are told again while it fires; `0s`: never.",
        "at most 30days; at least `interval`",
    ),
    ("recovery", Shape::Bool, "Whether people are told when it is over.", ""),
    (
        "channels",
        Shape::Texts,
        "Through which people are told. Without it all that are configured, or the log.",
        "names of channels",
    ),
    (
        "databases",
        Shape::Texts,
        "Only of these databases, or of these of their sets of tables (`orders/a_`).",
        "names of databases",
    ),
    ("destination", Shape::Text, "Only of destinations with this name; `*` is any text.", "of rules about destinations"),
    ("consumer", Shape::Text, "Only of consumers with this name; `*` is any text.", "of rules about consumers"),
    ("queue", Shape::Text, "Only of queues with this name; `*` is any text.", "of rules about queues"),
];

const KIND: Key = (
    "kind",
    Shape::Text,
    "What kind of transport it is.",
    "`http`, `rabbitmq`, `kafka` or `nats`; may be left out in `[transports.http]`",
);
const CA_FILE: &str = "PEM file with the certificates to trust, instead of the system's.";
const CONNECT: &str = "A connection, name lookup and TLS handshake included, must stand within this time, or the destination is down. Unless it is \
     written, half of `relay.send_timeout` where that is not more than 5s.";
const CONNECT_LIMITS: &str = "1ms to 1h; less than `relay.send_timeout`";

pub(super) const HTTP: Keys = &[
    KIND,
    (
        "allow_private",
        Shape::Bool,
        "Call every address, private ones and cloud metadata services included. Only where you trust everybody who can write a \
         destination.",
        "",
    ),
    (
        "allow",
        Shape::Texts,
        "Addresses and networks that may be called although they are not public.",
        "IP addresses, CIDR networks",
    ),
    ("response_limit", SIZE, "Bytes of a failed request's response that are kept in the attempt log.", "at most 1048576"),
    ("connect_timeout", Shape::Duration, CONNECT, CONNECT_LIMITS),
    ("user_agent", Shape::Text, "Value of that header.", "no control characters"),
];
pub(super) const RABBITMQ: Keys = &[
    KIND,
    ("url", Shape::Url, "`amqp://user:password@host:5672/vhost`, or `amqps://` for TLS.", ""),
    (
        "heartbeat",
        Shape::Duration,
        "After two of these without a sign of life the connection counts as lost.",
        "1s to 1h, whole seconds",
    ),
    ("connect_timeout", Shape::Duration, CONNECT, CONNECT_LIMITS),
    ("connection_name", Shape::Text, "What RabbitMQ's management shows.", "text of 1 to 255 bytes, no control characters"),
    ("ca_file", Shape::Text, CA_FILE, "needs `amqps://`"),
    (
        "watch",
        Shape::Texts,
        "Queues whose depth and consumers are looked at. Those that routes lead to by name are, without being named here.",
        "names of 1 to 255 bytes",
    ),
];
pub(super) const KAFKA: Keys = &[
    KIND,
    ("brokers", Shape::Servers, "Brokers to ask first: `host:9092,host2:9092`.", ""),
    (
        "properties",
        Shape::Named(&Shape::Property),
        "Properties of librdkafka's producer; a name with dots stands in quotes: `\"security.protocol\" = \"ssl\"`.",
        "not those that the guarantee rests on",
    ),
    (
        "watch",
        Shape::Tables(&[
            ("group", Shape::Text, "The consumer group.", ""),
            ("topics", Shape::Texts, "The topics that it receives from.", "at least one topic"),
        ]),
        "Consumer groups whose lag is looked at. Needs the right to describe group and topics; it joins no group.",
        "",
    ),
];
pub(super) const NATS: Keys = &[
    KIND,
    (
        "url",
        Shape::Servers,
        "`nats://user:password@host:4222`, `nats://token@host`, `tls://…`; several with commas between them.",
        "",
    ),
    ("credentials", Shape::Text, "A `.creds` file (JWT and key).", ""),
    ("ca_file", Shape::Text, CA_FILE, "with it, only TLS connections are made"),
    ("connect_timeout", Shape::Duration, CONNECT, CONNECT_LIMITS),
    (
        "watch",
        Shape::Tables(&[
            ("stream", Shape::Text, "The stream.", ""),
            ("consumers", Shape::Texts, "Its durable consumers.", "at least one consumer"),
        ]),
        "Durable consumers whose pending messages are looked at.",
        "",
    ),
];

const S3: Keys = &[
    ("endpoint", Shape::Url, "Address of a service that speaks S3; AWS without it. With one, the bucket stands in the path.", ""),
    ("region", Shape::Text, "Without it `AWS_REGION`, or `us-east-1`.", ""),
    ("access_key", Shape::Secret, "Without it `AWS_ACCESS_KEY_ID`.", ""),
    ("secret_key", Shape::Secret, "Without it `AWS_SECRET_ACCESS_KEY`.", ""),
    ("session_token", Shape::Secret, "Of temporary credentials. Without it `AWS_SESSION_TOKEN`.", ""),
];
const TERM: &str = "1s to 36525days, or `never`";
pub(super) const RETENTION: Keys = &[
    ("sent", Shape::Term, "How long delivered messages stay, counted from when they were published.", TERM),
    (
        "receipts",
        Shape::Term,
        "When which instance delivered what. Default: 30 days, or as long as `sent` if that is longer.",
        TERM,
    ),
    ("attempts", Shape::Term, "Failed attempts of messages that are delivered by now. Default as for `receipts`.", TERM),
    ("dedup", Shape::Term, "Dedup keys. One that is gone can be published with once more. Default as for `receipts`.", TERM),
    ("audit", Shape::Term, "What operators did.", TERM),
    ("every", Shape::Duration, "How often it is looked for what is over its term.", "1s to 30days"),
    ("budget", Shape::Duration, "The longest that one round of the relay works; the next one goes on there.", "1s to 30days"),
    (
        "archive",
        Shape::Text,
        "`file:///directory` or `s3://bucket/prefix`, where messages are written before they go. Without it they are gone.",
        "an absolute path; credentials for a bucket",
    ),
    ("format", Shape::OneOf(&["ndjson", "parquet"]), "What archives are written as.", "`parquet` in a build with it"),
    ("s3", Shape::Table(S3), "How the bucket is reached.", ""),
];
const DATABASE: Keys = &[
    (
        "url",
        Shape::Url,
        "`postgres://user:password@host:5432/db`, `mysql://…` (or `mariadb://…`), `sqlite:shop.db`, `sqlite:///var/lib/shop.db`. \
         Characters such as `@ : / #` in a password are written `%40 %3A %2F %23`.",
        "no SQLite database in memory",
    ),
    ("prefix", Shape::Text, "Of all table names.", "1 to 32 of `a-z`, `0-9`, `_`, not starting with a digit"),
    (
        "tables",
        Shape::Texts,
        "The prefixes of several sets of tables, instead of `prefix`. Each set is a source of its own, named `NAME/prefix`.",
        "one or more, each as for `prefix`",
    ),
    (
        "schema",
        Shape::Text,
        "Schema (PostgreSQL) or database (MySQL) of the tables. Without it `public`, or the database of the URL.",
        "as for `prefix`, up to 63; not of SQLite",
    ),
    (
        "houses",
        Shape::Whole(1, posthouse::store::MAX_HOUSES as i64),
        "How many houses a first migration makes; without it 64. Later it must be what the database has, or nothing starts; \
         `posthouse houses resize` changes it.",
        "1 to 4096; SQLite always has 1",
    ),
    ("retention", Shape::Table(RETENTION), "What is said here goes before `[retention]`, key by key.", ""),
];
const XXL_JOB: Keys = &[
    (
        "admins",
        Shape::Urls,
        "Base addresses of admins, context path included, tried in their order until one says yes.",
        "`http://` or `https://`, nothing behind `?`",
    ),
    ("app_name", Shape::Text, "The *AppName* of the admin's executor group.", "1 to 64 ASCII characters without spaces"),
    (
        "access_token",
        Shape::Secret,
        "What admin and executor must both know. Needed unless `allow_anonymous` is true.",
        "not `default_token`",
    ),
    ("allow_anonymous", Shape::Bool, "Let everybody in who reaches the address, or who knows the well-known token.", ""),
    ("listen", Shape::Text, "Address and port for the admin's requests.", "IP address and port"),
    (
        "advertise",
        Shape::Url,
        "The address that the admin is told. Without it the one that is listened on.",
        "needed where `listen` is `0.0.0.0` or `[::]`",
    ),
    (
        "data_dir",
        Shape::Text,
        "Directory for logs of runs and results that no admin has taken yet; made if it isn't there.",
        "one process at a time",
    ),
    ("log_retention", Shape::Duration, "How long the log of a run is kept.", "1h to 3650days"),
    ("callback_retry", Shape::Duration, "How often results that no admin took are told again.", "100ms to 1h"),
];
const TELEMETRY: Keys = &[
    (
        "otlp_endpoint",
        Shape::Url,
        "The collector's address; metrics go to `/v1/metrics` below it, over HTTP with protobuf.",
        "`http://` or `https://`, not the port for gRPC (4317)",
    ),
    ("interval", Shape::Duration, "How often.", "1s to 1h"),
    ("timeout", Shape::Duration, "How long the collector may take.", "100ms to 1m, not longer than `interval`"),
    ("headers", Shape::Named(&Shape::Secret), "Sent with each request.", ""),
    (
        "resource",
        Shape::Named(&Shape::Text),
        "Resource attributes. `service.name` is `posthouse`, `service.instance.id` is `relay.instance`, or host name and process id, \
         unless they are given here.",
        "",
    ),
];
const ADOPTED_STATE: Keys = &[
    ("column", Shape::Text, "The column.", ""),
    ("pending", Shape::Free, "Values of rows that are to be sent: a list.", ""),
    ("null", Shape::Bool, "Whether NULL is one of them.", ""),
    (
        "sending",
        Shape::Free,
        "The value of a row that is being sent. Without one, claims are kept in Posthouse's own table alone.",
        "",
    ),
    ("sent", Shape::Free, "The value of a row that was sent.", "each state has a value of its own"),
    ("failed", Shape::Free, "The value of a row that is given up.", ""),
    (
        "resend_failed",
        Shape::Bool,
        "Rows found in the failed state are sent too, unless Posthouse itself gave them up.",
        "needs `failed`",
    ),
];
const ADOPTED: Keys = &[
    (
        "preset",
        Shape::OneOf(&["producer_message", "local_task_message", "mq_state"]),
        "A known layout that fills all that isn't given here, needed keys included. An empty text takes one of its columns away.",
        "",
    ),
    (
        "databases",
        Shape::Texts,
        "Names of `[databases.NAME]`; all when empty. Of one with several sets of tables the first keeps the claims.",
        "not SQLite",
    ),
    (
        "schema",
        Shape::Text,
        "Schema (PostgreSQL) or database (MySQL) of the table. Without it, that of Posthouse's own tables.",
        "",
    ),
    (
        "table",
        Shape::Text,
        "Its name, or a pattern that ends with `*` for digits; new tables are found within half a minute.",
        "",
    ),
    (
        "id",
        Shape::Text,
        "The column that names a row: whole numbers, text or bytes.",
        "a primary key or unique index on this column alone; up to 255 bytes",
    ),
    ("state", Shape::Table(ADOPTED_STATE), "The column that says how far a row is, and its values.", ""),
    ("message_id", Shape::Text, "The column with the message id. Without it `table/id`.", ""),
    (
        "destination",
        Shape::Url,
        "Where a row goes: a text in which `{column}` stands for the row's value; braces themselves are written twice.",
        "",
    ),
    (
        "notify",
        Shape::Table(&[
            ("type", Shape::Text, "The column that says `http` or `rabbit_mq`.", ""),
            ("config", Shape::Text, "The column with the JSON that says where.", ""),
            ("transport", Shape::Text, "The transport for `rabbit_mq`; `amqp` without it.", ""),
        ]),
        "Columns that say how to notify whom, instead of `destination`.",
        "",
    ),
    (
        "key",
        Shape::Text,
        "The column with the ordering key: a row goes when every row of its key with a lower id is finished.",
        "",
    ),
    (
        "payload",
        Shape::Free,
        "What is sent: a column, or `{ columns = [...] }` or `{ fields = { name = \"column\" } }` for a JSON object.",
        "",
    ),
    ("type", Shape::Text, "The message's type, a text as for `destination`.", ""),
    (
        "content_type",
        Shape::Text,
        "The payload's media type, a text as for `destination`. Without it `application/json` for JSON, else `application/octet-stream`.",
        "",
    ),
    ("attempts", Shape::Text, "The column that counts failed attempts. Without it `posthouse_adopted` does.", ""),
    ("max_attempts", Shape::Text, "The column with the row's own limit of attempts.", ""),
    ("next_attempt", Shape::Text, "The column with the time of the next attempt. Without it `posthouse_adopted` has it.", ""),
    ("error", Shape::Text, "The column for the last error. Without it `posthouse_adopted` has it.", ""),
    ("version", Shape::Text, "The column with a number that every writer raises and compares.", ""),
    ("created", Shape::Text, "The column with the time at which the row was made.", ""),
    ("updated", Shape::Text, "The column with the time of the last change; it is set with each write.", ""),
    ("house", Shape::Text, "The column with a house number: instances begin with different ones.", ""),
    (
        "unsent_after",
        Shape::Duration,
        "Only pending rows older than this by `created`; those in the failed state at once.",
        "needs `created`",
    ),
    (
        "stuck_after",
        Shape::Duration,
        "Also rows that their owner has left in the sending state, unchanged by `updated` for this long.",
        "needs `updated` and `state.sending`",
    ),
    ("retry", Shape::Table(RETRY), "When and how often to try again. Without it, as the route says.", ""),
    ("on_exhausted", Shape::OneOf(&["block", "skip"]), "What a row that is given up does to later ones of its key.", ""),
    ("max_claims", U32, "A row during whose sending this many processes died is given up.", "1 to 100"),
    ("batch", U32, "Rows per claim.", "1 to 1000"),
    ("concurrency", U32, "Rows of one table at once, per instance.", "1 to 10000"),
    (
        "lease",
        Shape::Duration,
        "How long a claim lasts without renewal.",
        "at most 1h; at least 1.5 × (`relay.send_timeout` + `relay.lease_margin`)",
    ),
    ("interval", Shape::Duration, "Wait after a scan that sent nothing.", "10ms to 1h"),
];
const TOKEN: &str = "16 bytes or more, printable ASCII";
const SERVER: Keys = &[
    (
        "listen",
        Shape::Text,
        "Where pages, API, health and metrics are. An address that other machines can reach needs one of `token`, `viewer_token`, \
         `trusted_proxy_header`, `allow_public`; otherwise nothing starts.",
        "IP address and port",
    ),
    (
        "allow_public",
        Shape::Bool,
        "`/metrics`, `/destinations` and the whole `/readyz` may be read by everybody who reaches the address, unless there is a \
         `metrics_token`. It opens neither pages nor API.",
        "",
    ),
    ("token", Shape::Secret, "Who sends it may look and act (role operator).", TOKEN),
    ("viewer_token", Shape::Secret, "Who sends it may look (role viewer).", "16 bytes or more; not the same as `token`"),
    (
        "metrics_token",
        Shape::Secret,
        "Who sends it may read `/metrics`, `/destinations` and the whole `/readyz`, and nothing else.",
        "16 bytes or more; not the same as `token`",
    ),
    (
        "session_key",
        Shape::Secret,
        "What logins are signed with; the same in several instances behind one name. Without it each process makes its own, and \
         logins end with it.",
        TOKEN,
    ),
    ("session", Shape::Duration, "How long a login lasts.", "1m to 90days"),
    (
        "trusted_proxy_header",
        Shape::Text,
        "The header in which a proxy says who asks, such as `X-Forwarded-User`. The proxy must set it on every request, and take out \
         what its clients send under this name.",
        "not `Authorization`, `Cookie`, `Host`, `Origin`",
    ),
    (
        "trusted_proxies",
        Shape::Texts,
        "Addresses and networks from which this header is believed.",
        "IP addresses, CIDR networks",
    ),
    (
        "operators",
        Shape::Texts,
        "Names that the proxy says, of those who may act; `\"*\"` is everybody. The others may look.",
        "needs `trusted_proxy_header`",
    ),
    (
        "hosts",
        Shape::Texts,
        "Names of this server, beside its address: where there is no token, a request for another name is refused.",
        "",
    ),
    (
        "trace_url",
        Shape::Url,
        "Where a trace is shown, such as `https://traces.example/trace/{trace_id}`: messages with a `traceparent` header get a link.",
        "`http://` or `https://`, with `{trace_id}` in it",
    ),
    ("alerts_retention", Shape::Duration, "How long the history of alerts is kept.", "1h to 3650days"),
];
const MASK: Keys = &[
    (
        "destinations",
        Shape::Texts,
        "Patterns of the destinations that it is about: names of routes, or where they lead; `*` is any text. A message counts by \
         where it was published to and by where it goes now.",
        "",
    ),
    ("consumers", Shape::Texts, "The same for received messages, by consumer.", ""),
    ("hide", Shape::Bool, "Nothing of the payload is shown.", "one of `hide`, `paths`, `headers` is needed"),
    (
        "paths",
        Shape::Texts,
        "Values in a JSON payload that are shown as `[masked]`: `$.card.number`, `$['a b']`, `$.lines[0].price`, `$.lines[*].price`, \
         `$.secrets.*`, `$..password` (however deep). Names are compared letter by letter.",
        "",
    ),
    ("headers", Shape::Texts, "Headers whose values are shown as `[masked]`; capital letters make no difference.", ""),
];

const CHANNEL_KIND: Key =
    ("kind", Shape::Text, "What kind of channel it is.", "`webhook`, `slack`, `dingtalk`, `feishu`, `wecom`, `smtp` or `log`");
const TEMPLATE: Key = (
    "template",
    Shape::Text,
    "How each notice reads. Without it, a built-in text. See [alerts.md](alerts.md#templates).",
    "what it names exists",
);
const TIMEOUT: Key = ("timeout", Shape::Duration, "How long the channel may take.", "100ms to 45s");
const HOOK: Key =
    ("url", Shape::Secret, "Where notices are sent. Whoever knows it can send, so it is a secret.", "`http://` or `https://`");

pub(super) const WEBHOOK: Keys = &[
    CHANNEL_KIND,
    HOOK,
    (
        "signing_keys",
        Shape::Secrets,
        "Keys that sign each request as Standard Webhooks describes.",
        "each `whsec_` and the Base64 of 24 to 64 bytes",
    ),
    ("headers", Shape::Named(&Shape::Secret), "Headers of each request.", ""),
    TEMPLATE,
    TIMEOUT,
];
pub(super) const PLAIN: Keys = &[CHANNEL_KIND, HOOK, TEMPLATE, TIMEOUT];
pub(super) const SIGNED: Keys = &[
    CHANNEL_KIND,
    HOOK,
    ("secret", Shape::Secret, "What the robot checks signatures with (加签, 签名校验).", ""),
    TEMPLATE,
    TIMEOUT,
];
pub(super) const SMTP: Keys = &[
    CHANNEL_KIND,
    ("host", Shape::Text, "The mail server.", ""),
    (
        "port",
        Shape::Whole(1, u16::MAX as i64),
        "Its port. Without it 587 for `starttls`, 465 for `tls`, 25 for `none`.",
        "1 to 65535",
    ),
    ("tls", Shape::OneOf(&["starttls", "tls", "none"]), "How it is talked to.", "`none` only to this machine"),
    ("from", Shape::Text, "The sender.", "a mail address"),
    ("to", Shape::Texts, "Who gets the mail, all in one.", "one mail address or more"),
    ("username", Shape::Text, "The login, if the server wants one.", "together with `password`"),
    ("password", Shape::Secret, "Its password.", "together with `username`"),
    ("ca_file", Shape::Text, CA_FILE, ""),
    TEMPLATE,
    TIMEOUT,
];
pub(super) const LOG: Keys = &[CHANNEL_KIND, TEMPLATE, TIMEOUT];

const DATABASE_SHAPE: Shape = Shape::Table(DATABASE);
const ADOPTED_SHAPE: Shape = Shape::Table(ADOPTED);
const ROUTE_SHAPE: Shape = Shape::Table(ROUTE);

/// The whole file, but for transports and channels: what they hold depends on their kind.
pub(super) const FILE: Keys = &[
    ("databases", Shape::Named(&DATABASE_SHAPE), "One table per database; the name is yours.", "no `/` in the name"),
    (
        "transports",
        Shape::Named(&Shape::Table(&[])),
        "Ways to send. The name is the scheme of addresses. `http` is there without a table.",
        "`a-z`, `0-9`, `+`, `.`, `-` and `_`, starting with a letter; not `https`, not `local`",
    ),
    ("routes", Shape::Named(&ROUTE_SHAPE), "Where messages go that were published to this name, and how.", ""),
    (
        "groups",
        Shape::Tables(GROUP),
        "Sets of houses that are sent from in their own way. Without any, all houses, all the time.",
        "",
    ),
    ("adopted", Shape::Named(&ADOPTED_SHAPE), "Tables of other applications that are scanned by a mapping of their columns.", ""),
    ("alerts", Shape::Tables(ALERT), "Changes of the rules that hold anyway, and rules beside them.", ""),
    (
        "channels",
        Shape::Named(&Shape::Table(&[])),
        "Ways to tell people about alerts. Without any, the log.",
        "a name of 1 to 64 bytes",
    ),
    ("relay", Shape::Table(RELAY), "How relays work: leases, deadlines, polling, memory.", ""),
    ("retention", Shape::Table(RETENTION), "How long what is done with stays. Without this table nothing is ever removed.", ""),
    ("server", Shape::Table(SERVER), "Where pages, API and metrics are, and who may see and do what there.", ""),
    ("masks", Shape::Tables(MASK), "What of payloads and headers people must not see.", ""),
    ("telemetry", Shape::Table(TELEMETRY), "Metrics to an OpenTelemetry collector. Without this table they go to none.", ""),
    ("xxl_job", Shape::Table(XXL_JOB), "The executor for an XXL-JOB admin. Without this table there is none.", ""),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use posthouse::transport::HttpSettings;
    use posthouse::{CloudEvents, Group, HttpRoute, RabbitMqRoute, RelaySettings, Retry, Route};
    use serde::Serialize;

    use super::*;

    fn same(settings: &impl Serialize, keys: Keys, own: &[&str]) {
        let json = serde_json::to_value(settings).unwrap();
        let theirs: BTreeSet<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let ours: BTreeSet<&str> = keys.iter().map(|(name, ..)| *name).filter(|name| !own.contains(name)).collect();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn the_keys_are_those_of_the_library() {
        same(&RelaySettings::default(), RELAY, &[]);
        same(&posthouse::Adopted::default(), ADOPTED, &[]);
        same(&posthouse::AdoptedState::default(), ADOPTED_STATE, &[]);
        same(&Route::default(), ROUTE, &[]);
        same(&Retry::default(), RETRY, &[]);
        same(&Group::default(), GROUP, &[]);
        same(&posthouse::RetentionSettings::default(), RETENTION, &[]);
        same(&posthouse::S3Settings::default(), S3, &[]);
        // How long alerts are kept is a setting of the whole.
        same(&super::super::ServerConfig::default(), SERVER, &["alerts_retention"]);
        same(&super::super::MaskConfig::default(), MASK, &[]);
        same(&HttpRoute::default(), HTTP_ROUTE, &[]);
        same(&CloudEvents::default(), CLOUDEVENTS, &[]);
        same(&RabbitMqRoute::default(), RABBITMQ_ROUTE, &[]);
        let transport = |settings: serde_json::Value, keys: Keys| same(&settings, keys, &["kind", "watch"]);
        transport(serde_json::json!(HttpSettings::default()), HTTP);
        #[cfg(feature = "rabbitmq")]
        transport(serde_json::json!(posthouse::transport::RabbitMqSettings::default()), RABBITMQ);
        #[cfg(feature = "kafka")]
        transport(serde_json::json!(posthouse::transport::KafkaSettings::default()), KAFKA);
        #[cfg(feature = "nats")]
        transport(serde_json::json!(posthouse::transport::NatsSettings::default()), NATS);
    }
}
