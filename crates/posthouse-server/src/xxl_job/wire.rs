//! What goes over the wire: XXL-JOB 2.3 to 3.5, whose three generations differ in names only.
//!
//! What arrives is read with the names of all of them. Answers carry their content under both names. Results are told in the
//! form of the generation that asked for the run.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::output::clean;

/// Whom a request must come from, and what it must know.
pub(super) const TOKEN: &str = "xxl-job-access-token";
pub(super) const APP_NAME: &str = "xxl-job-appname";

/// The content type of an executor's answers.
pub(super) const HTML: &str = "text/html;charset=UTF-8";

/// The content type of what an executor sends.
pub(super) const JSON: &str = "application/json;charset=UTF-8";

/// The largest body that an executor takes.
pub(super) const LARGEST_BODY: usize = 5 << 20;

/// The longest text of a result. Counted as Java counts, which is how the admin does.
const LONGEST_MESSAGE: usize = 15_000;

pub(super) const OK: u16 = 200;
pub(super) const FAILED: u16 = 500;
pub(super) const TIMEOUT: u16 = 502;

/// `/run`, `/trigger`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RunRequest {
    pub(super) job_id: i64,
    pub(super) log_id: i64,
    executor_handler: Option<String>,
    executor_params: Option<String>,
    executor_block_strategy: Option<String>,
    /// In seconds; none when it isn't positive.
    executor_timeout: Option<i64>,
    log_date_time: Option<i64>,
    log_date_tim: Option<i64>,
    glue_type: Option<String>,
    broadcast_index: Option<i64>,
    broadcast_total: Option<i64>,
}

/// What happens to a run of a job whose last one is still going.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Block {
    /// It waits.
    Serial,
    /// It does not take place.
    Discard,
    /// The one that is going is stopped.
    Cover,
}

impl RunRequest {
    pub(super) fn handler(&self) -> &str {
        self.executor_handler.as_deref().unwrap_or_default()
    }

    pub(super) fn params(&self) -> &str {
        self.executor_params.as_deref().unwrap_or_default()
    }

    /// What is no other strategy waits, as with other executors.
    pub(super) fn block(&self) -> Block {
        match self.executor_block_strategy.as_deref() {
            Some("DISCARD_LATER") => Block::Discard,
            Some("COVER_EARLY") => Block::Cover,
            _ => Block::Serial,
        }
    }

    pub(super) fn timeout_s(&self) -> Option<u64> {
        self.executor_timeout.and_then(|s| u64::try_from(s).ok()).filter(|s| *s > 0)
    }

    /// When the admin wrote its row of this run, in milliseconds: a result brings it back.
    pub(super) fn date(&self) -> i64 {
        self.log_date_time.or(self.log_date_tim).unwrap_or_default()
    }

    pub(super) fn glue_type(&self) -> &str {
        self.glue_type.as_deref().unwrap_or("BEAN")
    }

    /// Which part of a broadcast this is: index and number of parts.
    pub(super) fn shard(&self) -> Result<(usize, usize), String> {
        let (index, total) = (self.broadcast_index.unwrap_or_default(), self.broadcast_total.unwrap_or_default());
        if total <= 1 {
            return Ok((0, 1));
        }
        if !(0..total).contains(&index) {
            return Err(format!("there is no part {index} of a broadcast to {total}"));
        }
        match (usize::try_from(index), usize::try_from(total)) {
            (Ok(index), Ok(total)) => Ok((index, total)),
            _ => Err(format!("a broadcast to {total} is too large")),
        }
    }
}

/// `/idleBeat`, `/kill`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct JobRequest {
    pub(super) job_id: i64,
}

/// `/log`. The date that comes with it says nothing that the id doesn't, and admins don't agree on which date it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LogRequest {
    pub(super) log_id: i64,
    #[serde(default)]
    pub(super) from_line_num: i64,
}

/// A piece of the log of a run: lines from 1, both ends included.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LogPiece {
    pub(super) from_line_num: i64,
    pub(super) to_line_num: i64,
    pub(super) log_content: String,
    pub(super) is_end: bool,
}

/// An answer. Its content stands under the names of all generations.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    code: u16,
    msg: Option<String>,
    content: Value,
    data: Value,
}

impl Answer {
    pub(super) fn ok() -> Self {
        Self { code: OK, msg: None, content: Value::Null, data: Value::Null }
    }

    pub(super) fn with(content: Value) -> Self {
        Self { content: content.clone(), data: content, ..Self::ok() }
    }

    pub(super) fn failed(msg: impl AsRef<str>) -> Self {
        Self { code: FAILED, msg: Some(shown(msg.as_ref())), ..Self::ok() }
    }
}

impl From<Result<(), String>> for Answer {
    fn from(result: Result<(), String>) -> Self {
        match result {
            Ok(()) => Self::ok(),
            Err(why) => Self::failed(why),
        }
    }
}

/// How the admin that asked for a run takes its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Form {
    /// An array, with a date that is misspelt. Asked through `/run`.
    Array,
    /// An object with the array in it. Asked through `/trigger`.
    Object,
}

impl Form {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Array => Self::Object,
            Self::Object => Self::Array,
        }
    }
}

/// The result of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told<'t> {
    pub(super) log_id: i64,
    pub(super) date: i64,
    pub(super) code: u16,
    pub(super) message: &'t str,
}

/// The body that tells results.
pub(super) fn callback(form: Form, results: &[Told<'_>]) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Item<'t> {
        log_id: i64,
        #[serde(skip_serializing_if = "Option::is_none")]
        log_date_tim: Option<i64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        log_date_time: Option<i64>,
        handle_code: u16,
        handle_msg: &'t str,
    }
    let items: Vec<_> = results
        .iter()
        .map(|r| Item {
            log_id: r.log_id,
            log_date_tim: (form == Form::Array).then_some(r.date),
            log_date_time: (form == Form::Object).then_some(r.date),
            handle_code: r.code,
            handle_msg: r.message,
        })
        .collect();
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Object<T> {
        callback_list: T,
    }
    let text = match form {
        Form::Array => serde_json::to_string(&items),
        Form::Object => serde_json::to_string(&Object { callback_list: items }),
    };
    match text {
        Ok(text) => text,
        Err(e) => unreachable!("numbers and texts are JSON: {e}"),
    }
}

/// The body of `registry` and `registryRemove`.
pub(super) fn registry(app_name: &str, address: &str) -> String {
    json!({ "registryGroup": "EXECUTOR", "registryKey": app_name, "registryValue": address }).to_string()
}

/// What an admin answers.
#[derive(Debug, Deserialize)]
pub(super) struct Reply {
    pub(super) code: i64,
    pub(super) msg: Option<String>,
}

/// Text as the admin may show it, which puts it into a page: some versions without escaping it.
pub(super) fn shown(text: &str) -> String {
    clean(text).replace('<', "‹").replace('>', "›")
}

/// Text of a result, no longer than the admin's column takes.
pub(super) fn cut(text: &str) -> String {
    const END: &str = "…";
    if text.encode_utf16().count() <= LONGEST_MESSAGE {
        return text.to_owned();
    }
    let mut units = END.encode_utf16().count();
    let kept = text.chars().take_while(|c| {
        units += c.len_utf16();
        units <= LONGEST_MESSAGE
    });
    kept.chain(END.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_in_every_generation_and_with_nothing_but_ids() {
        let run: RunRequest = serde_json::from_str(r#"{"jobId":1,"logId":2,"executorHandler":null,"later":{}}"#).unwrap();
        assert_eq!((run.handler(), run.params(), run.block(), run.timeout_s()), ("", "", Block::Serial, None));
        assert_eq!((run.date(), run.shard(), run.glue_type()), (0, Ok((0, 1)), "BEAN"));
        for text in [
            r#"{"jobId":1,"logId":2,"logDateTime":3}"#,
            r#"{"jobId":1,"logId":2,"logDateTim":3}"#,
            r#"{"jobId":1,"logId":2,"logDateTim":3,"logDateTime":3}"#,
        ] {
            assert_eq!(serde_json::from_str::<RunRequest>(text).unwrap().date(), 3, "{text}");
        }
    }

    #[test]
    fn parts_of_a_broadcast_are_counted_from_zero() {
        for (index, total, shard) in
            [(0, 0, Some((0, 1))), (5, 1, Some((0, 1))), (2, 3, Some((2, 3))), (3, 3, None), (-1, 3, None), (0, -1, Some((0, 1)))]
        {
            let text = format!(r#"{{"jobId":1,"logId":2,"broadcastIndex":{index},"broadcastTotal":{total}}}"#);
            assert_eq!(serde_json::from_str::<RunRequest>(&text).unwrap().shard().ok(), shard, "{text}");
        }
    }

    #[test]
    fn results_take_the_form_of_their_generation() {
        let told = [Told { log_id: 7, date: 1_586_629_003_729, code: 200, message: "a \"b\"" }];
        assert_eq!(
            callback(Form::Array, &told),
            r#"[{"logId":7,"logDateTim":1586629003729,"handleCode":200,"handleMsg":"a \"b\""}]"#
        );
        assert_eq!(
            callback(Form::Object, &told),
            r#"{"callbackList":[{"logId":7,"logDateTime":1586629003729,"handleCode":200,"handleMsg":"a \"b\""}]}"#
        );
    }

    #[test]
    fn messages_are_cut_as_the_admin_counts_them() {
        let exact = "x".repeat(LONGEST_MESSAGE);
        assert_eq!(cut(&exact), exact);
        assert_eq!(cut(&format!("{exact}y")), format!("{}…", "x".repeat(LONGEST_MESSAGE - 1)));
        // Two units each.
        let wide = "🐎".repeat(LONGEST_MESSAGE);
        let cut = cut(&wide);
        assert!(cut.encode_utf16().count() <= LONGEST_MESSAGE && cut.ends_with("🐎…"), "{}", cut.len());
    }

    #[test]
    fn what_is_shown_in_a_page_is_no_markup() {
        assert_eq!(shown("<script>\n"), "‹script›\\n");
    }
}
