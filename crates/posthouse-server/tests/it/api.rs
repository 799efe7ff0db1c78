//! The HTTP API, end to end.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{Client, Dir, MySqlDatabase, Receiver, Running, Schema, ph, posthouse, wait_for};

struct World {
    dir: Dir,
    relay: Running,
    receiver: Receiver,
}

const TOKEN: &str = "0123456789abcdef";
const MAIN: &str = "/api/v1/databases/main";

fn world(database: &str, rest: &str) -> World {
    let (dir, receiver) = (Dir::new(), Receiver::start());
    let to = receiver.address;
    dir.write(
        "posthouse.toml",
        &format!(
            "[databases.main]\n{database}\n[transports.http]\nallow = [\"127.0.0.1\"]\n[routes.orders]\nto = \"http://{to}/\"\n\
             [server]\nlisten = \"127.0.0.1:0\"\ntoken = \"{TOKEN}\"\n[relay]\nidle_poll = \"50ms\"\n{rest}"
        ),
    );
    ph(&dir, &["migrate"]).code(0);
    let relay = Running::start(&mut posthouse(&dir));
    World { dir, relay, receiver }
}

impl World {
    fn client(&self) -> Client {
        Client::new(&self.relay.address).bearer(TOKEN)
    }
}

#[test]
fn publishes_shows_and_acts_on_postgres() {
    let schema = Schema::new();
    everything(&world(&format!("url = {:?}\nschema = {:?}\nhouses = 4", schema.url, schema.name), REST));
}

#[test]
fn publishes_shows_and_acts_on_mysql() {
    let database = MySqlDatabase::new();
    everything(&world(&format!("url = {:?}\nhouses = 4", database.url), REST));
}

const REST: &str = "[routes.cards]\nto = \"http://127.0.0.1:9/\"\n[routes.pins]\nto = \"http://127.0.0.1:9/pins\"\n\
     [[masks]]\ndestinations = [\"cards\"]\npaths = [\"$.card.number\"]\nheaders = [\"X-Card\"]\n\
     [[masks]]\ndestinations = [\"http://127.0.0.1:9/p*\"]\nhide = true\n";

fn everything(w: &World) {
    let client = w.client();
    publish(w, &client);
    masked(&client);
    bulk(w, &client);
}

fn publish(w: &World, client: &Client) {
    let url = format!("{MAIN}/messages");
    let message = json!({
        "destination": "orders", "key": "k", "type": "order.placed", "headers": { "tenant": "acme" },
        "payload": { "z": 1, "a": [2] }, "message_id": "m-1", "dedup_key": "once",
    });
    let got = client.post(&url, &message).status(201).json();
    assert_eq!(got, json!({ "message_id": "m-1", "destination": "orders" }));
    client.post(&url, &message).status(201);
    client.post(&url, &json!({ "destination": "orders", "payload_base64": "AP8=", "message_id": "m-2" })).status(201);
    let seen = wait_for("both arrive", || Some(w.receiver.seen()).filter(|seen| seen.len() >= 2));
    let body = |id: &str| seen.iter().find(|s| s.message_id == id).map(|s| s.body.clone());
    assert_eq!(body("m-1").as_deref(), Some(&br#"{"a":[2],"z":1}"#[..]), "as it was sent");
    assert_eq!(body("m-2").as_deref(), Some(&b"\x00\xff"[..]));

    let rows = wait_for("it is SENT", || {
        let rows = client.get(&format!("{url}?message_id=m-1")).status(200).json();
        (rows["messages"][0]["status"] == "SENT").then_some(rows)
    });
    assert_eq!((rows["messages"].as_array().unwrap().len(), &rows["next_before"]), (1, &Value::Null), "a dedup key counts once");
    let id = rows["messages"][0]["id"].as_i64().unwrap();
    let detail = client.get(&format!("{url}/{id}")).status(200).json();
    assert_eq!(
        (detail["type"].as_str(), detail["key"].as_str(), detail["headers"]["tenant"].as_str()),
        (Some("order.placed"), Some("k"), Some("acme"))
    );
    assert_eq!(detail["payload"]["form"], "json");
    assert!(detail["delivered"]["at_ms"].is_i64(), "{detail}");
    let raw = client.get(&format!("{url}/{id}/payload")).status(200);
    assert_eq!((raw.text.as_str(), raw.header("content-type")), (r#"{"a":[2],"z":1}"#, "application/octet-stream"));
    assert!(
        raw.header("content-disposition").starts_with("attachment") && raw.header("content-security-policy").contains("sandbox")
    );

    // What can't be is refused with what is wrong.
    for (message, status, kind, field) in [
        (json!({ "destination": "ordres" }), 400, "invalid", Some("destination")),
        (json!({ "destination": "orders", "payload": 1, "payload_base64": "AA==" }), 400, "invalid", Some("payload")),
        (json!({ "destination": "orders", "payload_base64": "*" }), 400, "invalid", Some("payload_base64")),
        (json!({ "destination": "orders", "max_attempts": 0 }), 400, "invalid", Some("max_attempts")),
        (json!({ "destination": "orders", "headers": { "a": 5 } }), 400, "invalid", None),
        (json!({ "destination": "orders", "paylod": 1 }), 400, "invalid", None),
        (json!({}), 400, "invalid", None),
        (json!({ "destination": "orders", "payload": "x".repeat(12 << 20) }), 413, "too_large", None),
    ] {
        let got = client.post(&url, &message).status(status).json();
        assert_eq!((got["kind"].as_str(), got["field"].as_str()), (Some(kind), field), "{got}");
    }
    assert!(
        client.post(&url, &json!({ "destination": "ordres" })).json()["error"]
            .as_str()
            .unwrap()
            .contains("did you mean \"orders\"?")
    );
    for path in [
        "/messages?limit=0",
        "/messages?limit=1001",
        "/messages?colour=red",
        "/messages?text=",
        "/messages?status=sent-ish",
        "/messages?key=%00",
        "/messages/x",
    ] {
        client.get(&format!("{MAIN}{path}")).status(400);
    }
    client.get("/api/v1/databases/other/messages").status(404);
    client.get(&format!("{MAIN}/messages/999999")).status(404);
    client.get("/api/v2").status(404);
    let listed = client.get(&format!("{url}?text=acme&until_ms=1")).status(200).json();
    assert_eq!(listed["messages"], json!([]));
    let overview = client.get(&format!("{MAIN}/overview")).status(200).json();
    assert!(overview["relay"]["delivered"].as_u64().unwrap() >= 2, "{overview}");
    for path in [
        "/api/v1/databases",
        "/api/v1/destinations",
        &format!("{MAIN}/houses"),
        &format!("{MAIN}/instances"),
        &format!("{MAIN}/inbox"),
    ] {
        client.get(path).status(200);
    }
    let instances = client.get(&format!("{MAIN}/instances")).json();
    assert_eq!(instances["instances"].as_array().unwrap().len(), 1, "{instances}");
}

fn masked(client: &Client) {
    let url = format!("{MAIN}/messages");
    let send = |destination: &str, id: &str| {
        let message = json!({
            "destination": destination, "message_id": id, "deliver_in_ms": 3_600_000, "headers": { "x-card": "4111" },
            "payload": { "card": { "number": "4111", "name": "<script>" } },
        });
        client.post(&url, &message).status(201);
        let rows = client.get(&format!("{url}?message_id={id}")).json();
        client.get(&format!("{url}/{}", rows["messages"][0]["id"])).status(200).json()
    };
    let card = send("cards", "card-1");
    assert_eq!(card["headers"]["x-card"], "[masked]");
    assert_eq!(card["payload"]["text"], "{\n  \"card\": {\n    \"name\": \"<script>\",\n    \"number\": \"[masked]\"\n  }\n}");
    let pin = send("pins", "pin-1");
    assert_eq!((pin["payload"]["form"].as_str(), pin["payload"]["text"].as_str()), (Some("hidden"), Some("")));
    assert_eq!(pin["headers"]["x-card"], "4111");
    let open = send("orders", "open-1");
    assert_eq!(open["payload"]["masked"], false);
    for (detail, status) in [(&card, 403), (&pin, 403), (&open, 200)] {
        client.get(&format!("{url}/{}/payload", detail["id"])).status(status);
    }
    // Searching doesn't tell what is hidden.
    let found = client.get(&format!("{url}?text=4111")).json();
    let ids: Vec<&str> = found["messages"].as_array().unwrap().iter().filter_map(|m| m["message_id"].as_str()).collect();
    assert_eq!(ids, ["open-1"]);
    // Nor does sending it elsewhere.
    client.post(&format!("{url}/edit"), &json!({ "ids": [card["id"]], "destination": "cards" })).status(200);
    client.post(&format!("{url}/edit"), &json!({ "ids": [card["id"]], "destination": "carts" })).status(400);
    let edit = json!({ "ids": [card["id"], 999_999], "destination": "http://127.0.0.1:8/", "any_destination": true });
    let edited = client.post(&format!("{url}/edit"), &edit).status(200).json();
    assert_eq!((&edited["changed"], &edited["unchanged"]), (&json!([card["id"]]), &json!([999_999])));
    let after = client.get(&format!("{url}/{}", card["id"])).json();
    assert_eq!((after["published_to"].as_str(), after["payload"]["masked"].as_bool()), (Some("cards"), Some(true)));
    let skipped = client.post(&format!("{url}/skip"), &json!({ "ids": [card["id"], pin["id"], open["id"]] })).status(200).json();
    assert_eq!(skipped["changed"].as_array().unwrap().len(), 3);
}

fn bulk(w: &World, client: &Client) {
    let url = format!("{MAIN}/messages");
    w.receiver.answer_with(400);
    for n in 0..30 {
        client.post(&url, &json!({ "destination": "orders", "message_id": format!("bulk-{n}") })).status(201);
    }
    let failed = format!("{url}/count?status=FAILED&destination=orders");
    let count = wait_for("all have FAILED", || {
        let count = client.get(&failed).status(200).json();
        (count["messages"] == 31).then_some(count)
    });
    assert_eq!(client.get(&format!("{failed}&text=bulk-")).json(), json!({ "messages": 30, "more": false }));
    w.receiver.answer_with(200);
    let filter = json!({ "status": "FAILED", "destination": "orders", "text": "bulk-" });
    for (body, status) in [
        (json!({ "action": "requeue", "filter": {}, "confirmed": count }), 400),
        (json!({ "action": "requeue", "filter": { "status": "SENT" }, "confirmed": count }), 409),
        (json!({ "action": "edit", "filter": filter, "confirmed": count }), 400),
        (json!({ "action": "edit", "destination": "ordres", "filter": filter, "confirmed": count }), 400),
        (json!({ "action": "requeue", "filter": filter }), 400),
    ] {
        client.post(&format!("{url}/bulk"), &body).status(status);
    }
    let body = json!({ "action": "requeue", "filter": filter, "confirmed": { "messages": 30 } });
    let actor = client.with("x-actor", "ann");
    let started = actor.post(&format!("{url}/bulk"), &body).status(202).json();
    let progress = format!("/api/v1/bulk/{}", started["id"]);
    let ended = wait_for("it is done", || {
        let told = client.get(&progress).status(200).json();
        told["finished"].as_bool().unwrap().then_some(told)
    });
    assert_eq!(
        (&ended["done"], &ended["changed"], &ended["total"], &ended["error"]),
        (&json!(30), &json!(30), &json!(30), &Value::Null),
        "{ended}"
    );
    wait_for("all are sent", || (client.get(&failed).json()["messages"] == 1).then_some(()));
    assert_eq!(client.get("/api/v1/bulk").json()["actions"][0]["id"], started["id"]);
    actor.post(&format!("{progress}/stop"), &json!({})).status(200);
    client.get("/api/v1/bulk/99").status(404);
    let audit = client.get(&format!("{MAIN}/audit?actor=ann+(token)&action=bulk+requeue")).status(200).json();
    let line = &audit["lines"][0];
    assert_eq!((audit["lines"].as_array().unwrap().len(), line["amount"].as_i64()), (1, Some(30)), "{audit}");
    let detail: Value = serde_json::from_str(line["detail"].as_str().unwrap()).unwrap();
    assert_eq!(detail, filter);
    let each = client.get(&format!("{MAIN}/audit?actor=ann+(token)&action=requeue&limit=100")).json();
    assert_eq!(each["lines"].as_array().unwrap().len(), 30, "one line per message too");
}

#[test]
fn groups_are_run_paused_and_stopped() {
    let schema = Schema::new();
    let groups =
        "[[groups]]\nname = \"nightly\"\nhouses = \"0\"\ntrigger = \"manual\"\n[[groups]]\nname = \"rest\"\nhouses = \"1-3\"\n";
    let w = world(&format!("url = {:?}\nschema = {:?}\nhouses = 4", schema.url, schema.name), groups);
    let client = w.client();
    let group = |name: &str, verb: &str| client.post(&format!("{MAIN}/groups/{name}/{verb}"), &json!({}));
    let asked = group("nightly", "run").status(202).json();
    let runs = wait_for("it has run", || {
        let runs = client.get(&format!("{MAIN}/runs?request={}", asked["request"])).status(200).json();
        runs["runs"].as_array().unwrap().iter().any(|r| r["status"] == "DONE").then_some(runs)
    });
    assert!(runs["runs"].as_array().unwrap().iter().all(|r| r["group"] == "nightly"), "{runs}");
    assert_eq!(group("nightly", "pause").status(200).json()["changed"], true);
    assert_eq!(group("nightly", "pause").status(200).json()["changed"], false);
    assert_eq!(group("nightly", "resume").status(200).json()["changed"], true);
    group("nightly", "stop").status(200);
    group("rest", "run").status(409);
    assert!(group("nightli", "run").status(404).json()["error"].as_str().unwrap().contains("nightly"));
    let listed = client.get(&format!("{MAIN}/groups")).status(200).json();
    assert_eq!(listed["groups"][0]["name"], "nightly");
    let lines = client.get(&format!("{MAIN}/audit?limit=4")).json();
    let actions: Vec<&str> = lines["lines"].as_array().unwrap().iter().filter_map(|l| l["action"].as_str()).collect();
    assert_eq!(actions, ["group stop", "group resume", "group pause", "group run"], "{lines}");
    // The commands leave the same lines.
    ph(&w.dir, &["groups", "pause", "nightly"]).code(0);
    let audit = client.get(&format!("{MAIN}/audit?action=group+pause")).status(200).json();
    assert_eq!(audit["lines"].as_array().unwrap().len(), 2, "{audit}");
}

#[test]
fn alerts_are_silenced_and_told_again() {
    let dir = Dir::new();
    let w = world(&format!("url = \"sqlite://{}/a.db\"", dir.path().display()), "");
    let client = w.client();
    let alerts = format!("{MAIN}/alerts");
    let about = json!({ "rule": "outbox_failed", "subject": "orders", "seconds": 60, "reason": "known" });
    assert_eq!(client.post(&format!("{alerts}/silence"), &about).status(200).json()["changed"], true);
    let told = client.get(&alerts).status(200).json();
    let silence = &told["silences"][0];
    assert_eq!(
        (&silence["rule"], &silence["subject"], &silence["reason"]),
        (&"outbox_failed".into(), &"orders".into(), &"known".into())
    );
    let wrong = client.post(&format!("{alerts}/silence"), &json!({ "rule": "outbox_faild", "seconds": 60 })).status(400).json();
    assert_eq!(wrong["field"], "rule");
    client.post(&format!("{alerts}/silence"), &json!({ "rule": "all", "seconds": 0 })).status(400);
    let about = json!({ "rule": "outbox_failed", "subject": "orders" });
    assert_eq!(client.post(&format!("{alerts}/unsilence"), &about).status(200).json()["changed"], true);
    assert_eq!(client.post(&format!("{alerts}/unsilence"), &about).status(200).json()["changed"], false);
    let audit = client.get(&format!("{MAIN}/audit")).status(200).json();
    assert!(audit.to_string().contains("token"), "who did it is told: {audit}");
}

#[test]
fn the_document_is_whole() {
    let w = world("url = \"sqlite:main.db\"", "");
    let document = w.client().get("/api/v1/openapi.json").status(200).json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    assert_eq!(document["components"]["securitySchemes"]["token"]["scheme"], "bearer");
    let mut names = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        assert!(path.starts_with("/api/v1/"), "{path}");
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["summary"].as_str().is_some_and(|s| s.len() > 10), "{method} {path}");
            assert!(operation["responses"].as_object().unwrap().len() >= 2, "{method} {path}");
            for name in path.split(['{', '}']).skip(1).step_by(2) {
                let told = operation["parameters"].as_array().unwrap();
                assert!(told.iter().any(|p| p["name"] == name && p["in"] == "path"), "{name} in {method} {path}");
            }
        }
        names.insert(path.clone());
    }
    for needed in ["/messages", "/inbox", "/groups", "/runs", "/alerts", "/audit", "/houses", "/instances", "/overview"] {
        assert!(names.contains(&format!("/api/v1/databases/{{database}}{needed}")), "{needed}");
    }
    // Everything that is pointed to is there.
    let text = document.to_string();
    for reference in text.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document["components"]["schemas"][reference].is_object(), "{reference}");
    }
}
