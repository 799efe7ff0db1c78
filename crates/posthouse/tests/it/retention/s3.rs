//! Archives in a bucket, of a server that speaks S3.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use posthouse::S3Settings;

use super::{retention, round, scene, settings};
use crate::store::tables::Fresh;
use crate::support::{SOON, Sqlite, wait_for};

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// moto, where it is installed.
fn server(port: u16) -> Option<Server> {
    let mut command = Command::new("moto_server");
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
    match command.spawn() {
        Ok(child) => Some(Server(child)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => panic!("moto_server: {e}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_holds_what_was_in_the_log() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let Some(_server) = server(port) else {
        eprintln!("not tested: there is no moto_server here (pip install 'moto[server]')");
        return;
    };
    let endpoint = format!("http://127.0.0.1:{port}");
    let http = reqwest::Client::new();
    wait_for("the server, and its bucket", 3 * SOON, async || {
        // By the test server's own door: it takes no notice of who asks.
        http.put(format!("{endpoint}/old-mail")).send().await.is_ok_and(|r| r.status().is_success())
    })
    .await;

    let db = Fresh::<Sqlite>::new().await;
    let scene = scene(&db, false).await;
    let mut of = settings();
    of.archive = Some("s3://old-mail/a b/posthouse".into());
    let mut s3 = S3Settings::default();
    s3.endpoint = Some(endpoint);
    s3.access_key = Some("key".into());
    s3.secret_key = Some("very secret".into());
    of.s3 = s3;
    let report = round(&db, of.clone()).await;
    assert_eq!((report.removed, report.files, report.problems.len()), (6, 1, 0), "{report:?}");
    let retention_ = retention(&db, of.clone());
    let found = retention_.verify(10).await.unwrap();
    assert!(found[0].problem.is_none(), "{found:?}");
    let (low, high) = (scene.sent[0], scene.sent[5]);
    assert_eq!(found[0].file.location, format!("s3://old-mail/a b/posthouse/orders/message/{low:019}-{high:019}.ndjson.zst"));

    // Another bucket, which isn't there: nothing goes, and no secret is told.
    super::deliver(&db, &scene.open).await;
    of.archive = Some("s3://nowhere/x".into());
    let report = round(&db, of.clone()).await;
    assert_eq!((report.removed, report.problems.len()), (0, 1), "{report:?}");
    assert!(report.problems[0].contains("NoSuchBucket") && !format!("{report:?} {of:?}").contains("secret"), "{report:?}");
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 7);

    // Nobody answers.
    of.s3.endpoint = Some("http://127.0.0.1:1".into());
    of.archive = Some("s3://old-mail/y".into());
    let report = tokio::time::timeout(Duration::from_secs(60), round(&db, of.clone())).await.unwrap();
    assert!(report.problems[0].contains("can't be reached") && report.removed == 0, "{report:?}");
    db.remove().await;
}
