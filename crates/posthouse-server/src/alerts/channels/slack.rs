//! Slack's incoming webhooks, and what takes the same (Mattermost, Rocket.Chat, Discord's `/slack` addresses).

use serde_json::{Value, json};

use crate::alerts::notice::{Letter, Notice, cut};

/// A section takes 3000 characters.
const SECTION: usize = 2_900;

/// A message takes 50 blocks.
const BLOCKS: usize = 40;

pub(super) fn body(letter: &Letter) -> Value {
    let block = |text: &String| json!({ "type": "section", "text": { "type": "mrkdwn", "text": cut(text, SECTION) } });
    let blocks: Vec<Value> = letter.texts.iter().filter(|text| !text.is_empty()).take(BLOCKS).map(block).collect();
    // The text is what a notification on a phone shows.
    json!({ "text": letter.title, "blocks": blocks })
}

/// Values as Slack wants them: `<!channel>` in the name of a destination calls nobody.
pub(super) fn escaped(notices: Vec<Notice>) -> Vec<Notice> {
    let escape = |text: &mut String| *text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    notices
        .into_iter()
        .map(|mut notice| {
            for text in [
                &mut notice.rule,
                &mut notice.subject,
                &mut notice.database,
                &mut notice.summary,
                &mut notice.detail,
                &mut notice.hint,
                &mut notice.instance,
            ] {
                escape(text);
            }
            notice
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_destinations_call_nobody() {
        let notice = Notice { subject: "<!channel> & co".into(), ..Notice::test("i", 0) };
        let document = body(&Letter::new(escaped(vec![notice]), Some("*{{ state }}* <https://x|{{ subject }}>"))).to_string();
        assert!(!document.contains("<!channel>") && document.contains("&lt;!channel&gt; &amp; co"), "{document}");
        assert!(document.contains("*test* <https://x|"), "what the template says stays: {document}");
    }
}
