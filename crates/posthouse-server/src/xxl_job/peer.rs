//! The executor with an admin that is none of ours: `scripts/xxl-job-admin` starts one. Without it these tests are left out.

use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::Instant;
use url::Url;

use super::XxlJob;
use super::tests::{Place, SOON, Script, config, end};

/// The admin, through what its own pages use.
struct Peer {
    client: Client,
    /// Where executors register.
    url: Url,
    console: String,
    token: String,
}

impl Peer {
    async fn of_environment() -> Option<Self> {
        let Ok(url) = std::env::var("POSTHOUSE_TEST_XXL_ADMIN_URL") else {
            eprintln!("left out: POSTHOUSE_TEST_XXL_ADMIN_URL is not set; see scripts/xxl-job-admin");
            return None;
        };
        let url: Url = url.parse().unwrap();
        let console = format!("http://{}:{}/ratchjob/api/console/v1", url.host_str().unwrap(), url.port().unwrap() + 100);
        let mut peer = Self { client: Client::builder().no_proxy().build().unwrap(), url, console, token: String::new() };
        let login = peer.client.post(format!("{}/login/login", peer.console));
        let login = login.header("content-type", "application/x-www-form-urlencoded");
        // The password is base64.
        let answer = login.body("username=admin&password=YWRtaW4%3D").send().await.unwrap().text().await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        peer.token = answer["data"]["token"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        Some(peer)
    }

    async fn get(&self, url: &str) -> Value {
        let answer = self.client.get(url).header("token", &self.token).send().await.unwrap().text().await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["success"], true, "{url}: {answer}");
        answer["data"].clone()
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let request = self.client.post(format!("{}/{path}", self.console)).header("token", &self.token);
        let answer = request.header("content-type", "application/json").body(body.to_string()).send().await.unwrap();
        let answer: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
        assert_eq!(answer["success"], true, "{path}: {answer}");
        answer["data"].clone()
    }

    /// Addresses of executors with this name.
    async fn registered(&self, app_name: &str) -> Value {
        let root = format!("http://{}:{}", self.url.host_str().unwrap(), self.url.port().unwrap());
        self.get(&format!("{root}/ratch/v1/app/instance/addrs?appName={app_name}")).await
    }

    /// Makes a job and triggers it; its number.
    async fn triggers(&self, app_name: &str, run_mode: &str, group: &str) -> u64 {
        let job = json!({
            "appName": app_name, "description": "a test", "scheduleType": "NONE", "runMode": run_mode, "handleName": "posthouseScan",
            "triggerParam": group, "routerStrategy": "ROUND_ROBIN", "blockingStrategy": "SERIAL_EXECUTION", "enable": true,
        });
        let id = self.post("job/create", job).await["id"].as_u64().unwrap();
        self.post("job/trigger", json!({ "jobId": id })).await;
        id
    }

    /// The run of a job once it has ended.
    async fn ended(&self, job: u64) -> Value {
        until("the run ends", async || {
            let runs = self.get(&format!("{}/job/task/list?jobId={job}", self.console)).await;
            let run = runs["list"][0].clone();
            ["SUCCESS", "FAIL"].iter().any(|s| run["status"] == *s).then_some(run)
        })
        .await
    }
}

async fn until<T>(what: &str, met: impl AsyncFn() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(found) = met().await {
            return found;
        }
        assert!(Instant::now() < until, "not within {SOON:?}: {what}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn another_admin_triggers_runs_and_reads_results_and_logs() {
    let Some(peer) = Peer::of_environment().await else { return };
    let (place, script) = (Place::new(), Script::new(true));
    let mut config = config(&place, vec![peer.url.clone()]);
    config.app_name = format!("posthouse-{}", std::process::id());
    let app_name = config.app_name.clone();
    let xxl = XxlJob::start(&config, script.clone()).await.unwrap();
    let address = format!("http://{}/", xxl.address());
    until("it is registered", async || (peer.registered(&app_name).await == json!([address])).then_some(())).await;

    let job = peer.triggers(&app_name, "BEAN", "lottery").await;
    let run = peer.ended(job).await;
    assert_eq!(run["status"], "SUCCESS", "{run}");
    assert_eq!(script.taken().len(), 50);
    let log = peer.get(&format!("{}/job/task/log?jobId={job}&taskId={}&fromLineNum=1", peer.console, run["taskId"])).await;
    let text = log["logContent"].as_str().unwrap();
    assert!(text.contains("database a: 32 units of 32") && text.contains("200 50 sent, 0 to be"), "{log}");
    assert_eq!((log["isEnd"].as_bool(), log["toLineNum"].as_u64()), (Some(true), Some(text.lines().count() as u64)), "{log}");

    // It keeps the message of a result only when that is a failure.
    let broken = peer.triggers(&app_name, "BEAN", "broken").await;
    let failed = peer.ended(broken).await;
    assert_eq!(failed["status"], "FAIL", "{failed}");
    assert!(failed["callbackMessage"].as_str().unwrap().ends_with("house 0 belongs to relay-‹2›"), "{failed}");

    let script = peer.triggers(&app_name, "GLUE_SHELL", "lottery").await;
    let refused = peer.ended(script).await;
    assert_eq!(refused["status"], "FAIL", "{refused}");
    assert!(refused["triggerMessage"].as_str().unwrap().contains("posthouse runs no scripts"), "{refused}");

    end(xxl).await;
    until("it is gone", async || (peer.registered(&app_name).await == json!([])).then_some(())).await;
}
