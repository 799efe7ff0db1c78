//! Publishing from other languages: the programs of `examples/sql-contract`, and what arrives of it.

use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::sql_contract::{Shop, documentation};
use crate::support::{Dir, PATIENCE, Ran, Receiver, Running, Seen, posthouse, repository, run_with_stdin, unique, wait_for};

/// Has a house and a hash in the documentation.
const DESTINATION: &str = "订单";
const KEY: &str = "客户-1";

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Language {
    Python,
    Node,
    Java,
    Go,
}

impl Language {
    const ALL: [Self; 4] = [Self::Python, Self::Node, Self::Java, Self::Go];

    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Java => "java",
            Self::Go => "go",
        }
    }

    /// Those that are installed here. For what is left out there is a line in the output of the tests.
    fn here() -> Vec<Self> {
        Self::ALL.into_iter().filter(|language| language.is_here()).collect()
    }

    fn is_here(self) -> bool {
        let (needed, made): (&[&str], _) = match self {
            Self::Python => (&["python3"], "target/languages/python/made"),
            Self::Node => (&["node", "npm"], "examples/sql-contract/node/node_modules/.package-lock.json"),
            Self::Java => (&["java", "javac", "mvn"], "target/languages/java/made"),
            Self::Go => (&["go"], "target/languages/go/made"),
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        let missing = needed.iter().find(|program| !std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
        if let Some(missing) = missing {
            // Past the capture of the test's output, which is shown for failed tests only.
            let said = format!("SKIPPED: publishing from {}: there is no {missing} here\n", self.name());
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            return false;
        }
        assert!(repository(made).exists(), "{}: not installed; do it with: scripts/services languages", self.name());
        true
    }

    fn program(self, shop: &Shop) -> Command {
        let postgres = matches!(shop, Shop::Postgres(_));
        let example = |name: &str| repository("examples/sql-contract").join(self.name()).join(name);
        let installed = repository("target/languages").join(self.name());
        let mut command = match self {
            Self::Python => {
                let mut python = Command::new(installed.join("bin/python"));
                python.arg(example(if postgres { "postgres.py" } else { "mariadb.py" }));
                python
            }
            Self::Node => {
                let mut node = Command::new("node");
                node.arg(example(if postgres { "postgres.mjs" } else { "mysql.mjs" }));
                node
            }
            Self::Java => {
                let classes = installed.display();
                let mut java = Command::new("java");
                // These make a short run shorter.
                java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", &format!("{classes}:{classes}/lib/*")]);
                java.arg(if postgres { "Postgres" } else { "MariaDb" });
                java
            }
            Self::Go => Command::new(installed.join(if postgres { "postgres" } else { "mysql" })),
        };
        // Java reads its arguments in the encoding of the locale.
        command.env("LC_ALL", "C.UTF-8").arg(shop.url(self));
        command
    }
}

/// A message as it is published and expected.
struct Order {
    from: &'static str,
    customer: String,
    content_type: &'static str,
    payload: Vec<u8>,
}

impl Order {
    fn text(from: &'static str, customer: impl Into<String>) -> Self {
        let payload =
            format!("{{\"from\": \"{from}\", \"note\": \"naïve 北京 😀 'it''s' \\\\ % \\\"x\\\" ${{1}} ? %s\"}}").into_bytes();
        Self { from, customer: customer.into(), content_type: "application/json", payload }
    }

    /// Every byte there is, and what is no UTF-8.
    fn binary(from: &'static str, customer: impl Into<String>) -> Self {
        let payload = [&(0..=255).collect::<Vec<u8>>()[..], b"\xff\xc0\x80\0", from.as_bytes()].concat();
        Self { from, customer: customer.into(), content_type: "application/x-order", payload }
    }

    /// Places it with the program of a language.
    fn place(&self, language: Language, shop: &Shop, dir: &Dir, how: &[&str]) -> Ran {
        let file = dir.path().join(unique(self.from));
        std::fs::write(&file, &self.payload).unwrap();
        let mut program = language.program(shop);
        program.current_dir(dir.path()).args([DESTINATION, &self.customer, self.content_type]).arg(file).args(how);
        ran(&mut program)
    }

    /// Publishes it as the library does.
    fn publish(&self, dir: &Dir, more: &[&str]) -> Ran {
        let (kind, header) = (["--type", "order.placed.v1"], ["--header", "shop=北京"]);
        let mut program = posthouse(dir);
        program.args(["publish", DESTINATION, "-", "--key", &self.customer, "--content-type", self.content_type]);
        run_with_stdin(program.args(kind).args(header).args(more), &self.payload)
    }

    #[track_caller]
    fn assert_is(&self, seen: &Seen) {
        let header = |name: &str| String::from_utf8_lossy(seen.headers.get(name).map_or(&b""[..], |v| v.as_bytes())).into_owned();
        assert!(seen.body == self.payload, "{}: {:?}", self.from, String::from_utf8_lossy(&seen.body));
        assert_eq!(header("content-type"), self.content_type, "{}", self.from);
        assert_eq!(header("posthouse-type"), "order.placed.v1", "{}", self.from);
        // Messages with a dedup key have none.
        assert_eq!(header("shop"), if seen.message_id.starts_with("once-") { "" } else { "北京" }, "{}", self.from);
        let key: String = self
            .customer
            .bytes()
            .map(|b| if b.is_ascii_graphic() && b != b'%' { char::from(b).into() } else { format!("%{b:02X}") })
            .collect();
        assert_eq!(header("posthouse-key"), key, "{}", self.from);
    }
}

/// What came of a program that should end soon. One that doesn't, because something of it holds its driver, is ended.
fn ran(program: &mut Command) -> Ran {
    let mut child = program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    // What it says fits into the pipes.
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("has not ended in {PATIENCE:?}: {program:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.unwrap().read_to_string(&mut stderr).unwrap();
    Ran { code: status.code().unwrap_or(-1), stdout, stderr }
}

/// Number in a row of the documented table of hashes: 5 the hash, 6 the house.
fn documented_vector(column: usize) -> i64 {
    let page = documentation();
    let row =
        page.lines().find(|line| line.starts_with(&format!("| `{DESTINATION}` | `{KEY}` |"))).expect("the row of the hashes");
    row.split('|').nth(column).unwrap().trim().parse().unwrap()
}

fn other_languages_publish(place: impl FnOnce(&Dir, &str) -> Shop) {
    let languages = Language::here();
    let (dir, receiver) = (Dir::new(), Receiver::start());
    let rest = format!(
        "[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.{DESTINATION:?}]\nto = \"http://{}/\"\n\
         [relay]\nidle_poll = \"50ms\"\n[server]\nlisten = \"127.0.0.1:0\"\n",
        receiver.address
    );
    let shop = place(&dir, &rest);

    // One customer's orders, each from another language, twice round.
    let mut orders = Vec::new();
    for make in [Order::text, Order::binary] {
        let order = make("rust", KEY);
        order.publish(&dir, &[]).code(0);
        orders.push(order);
        for &language in &languages {
            let order = make(language.name(), KEY);
            assert_eq!(order.place(language, &shop, &dir, &[]).code(0).stdout, "published\n", "{language:?}");
            orders.push(order);
        }
    }
    // The same key has the same place, whoever publishes.
    for (column, expected) in [("house", documented_vector(6)), ("key_hash", documented_vector(5))] {
        let found = shop.numbers(&format!("SELECT CAST({column} AS {}) FROM posthouse_pending ORDER BY id", shop.bigint()));
        let found: Vec<_> = orders.iter().map(|o| o.from).zip(found).collect();
        assert_eq!(found.len(), orders.len());
        assert!(found.iter().all(|(_, number)| *number == expected), "not all have the {column} {expected}: {found:?}");
    }

    // What is no order's key: one whose hash depends on every byte, and on letters that can be written in two ways.
    let once = |name: &str| format!("Zoë-{name} 'é' \\ % 😀");
    std::thread::scope(|scope| {
        for &language in &languages {
            let (shop, dir) = (&shop, &dir);
            scope.spawn(move || {
                let name = language.name();
                let declined = Order::text(name, format!("declined-{name}")).place(language, shop, dir, &["declined"]);
                assert!(declined.code != 0 && declined.stderr.contains("declined"), "{language:?}: {declined:?}");
                let (order, dedup_key) = (Order::text(name, once(name)), format!("once-{name}-é"));
                for said in ["published\n", "published before\n"] {
                    let ran = order.place(language, shop, dir, &["once", &dedup_key]).code(0);
                    assert_eq!(ran.stdout, said, "{language:?}");
                }
                // Nor does the library publish with this dedup key; it takes it for the message's id as well.
                assert_eq!(order.publish(dir, &["--dedup-key", &dedup_key, "--json"]).code(0).json()["message_id"], *dedup_key);
            });
        }
    });
    let count = |sql: &str| shop.numbers(&format!("SELECT CAST(COUNT(*) AS {}) FROM {sql}", shop.bigint()))[0];
    assert_eq!(count("orders WHERE customer LIKE 'declined%'"), 0, "orders of transactions that were rolled back");
    assert_eq!(count("posthouse_outbox WHERE message_key LIKE 'declined%'"), 0, "messages of transactions that were rolled back");
    assert_eq!(count("orders WHERE customer LIKE 'Zoë%'"), 2 * languages.len() as i64, "a used dedup key doesn't stop the order");
    assert_eq!(count("posthouse_outbox"), (orders.len() + languages.len()) as i64);

    let relay = Running::start(&mut posthouse(&dir));
    let ids = || receiver.seen().into_iter().map(|s| s.message_id).collect::<HashSet<_>>();
    wait_for("all messages", || (ids().len() == orders.len() + languages.len()).then_some(()));
    relay.signal("TERM");
    assert_eq!(relay.ended().0, 0);

    // A resend would be no failure.
    let (mut known, mut seen) = (HashSet::new(), receiver.seen());
    seen.retain(|s| known.insert(s.message_id.clone()));
    let (of_one_key, others): (Vec<_>, Vec<_>) = seen.into_iter().partition(|s| !s.message_id.starts_with("once-"));
    let places: Vec<_> = of_one_key.iter().map(|seen| orders.iter().position(|o| o.payload == seen.body)).collect();
    assert!(places.iter().copied().eq((0..orders.len()).map(Some)), "not the bytes (None), or not in order: {places:?}");
    for (order, seen) in orders.iter().zip(&of_one_key) {
        order.assert_is(seen);
    }
    for language in languages {
        let id = format!("once-{}-%C3%A9", language.name());
        let seen = others.iter().find(|s| s.message_id == id).unwrap_or_else(|| panic!("{id} is not among {others:?}"));
        Order::text(language.name(), once(language.name())).assert_is(seen);
    }
}

#[test]
fn other_languages_publish_on_postgres() {
    other_languages_publish(Shop::postgres);
}

#[test]
fn other_languages_publish_on_mariadb() {
    other_languages_publish(Shop::mariadb);
}
