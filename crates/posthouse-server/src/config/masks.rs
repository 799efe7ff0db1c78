//! `[[masks]]`: what of payloads and headers people must not see.

use serde::{Deserialize, Serialize};
use toml::Value;

use super::problem::{Problem, join};
use super::shape::Walk;
use super::typed;
use crate::mask::{Mask, Masks, Path};

/// One `[[masks]]`, as it is written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct MaskConfig {
    pub(crate) destinations: Vec<String>,
    pub(crate) consumers: Vec<String>,
    pub(crate) hide: bool,
    pub(crate) paths: Vec<String>,
    pub(crate) headers: Vec<String>,
}

/// Reads what the walk has left. With a part left out it would hide less than was meant, so every mistake stops the start.
pub(super) fn read(walk: &mut Walk<'_>, value: Option<Value>) -> (Vec<MaskConfig>, Masks) {
    let (mut written, mut masks) = (Vec::new(), Vec::new());
    let Some(Value::Array(items)) = value else { return (written, Masks::default()) };
    for (place, item) in items.into_iter().enumerate() {
        let at = format!("masks[{place}]");
        let Some(mask) = typed::<MaskConfig>(walk, &at, item) else { continue };
        let mut paths = Vec::new();
        for text in &mask.paths {
            match Path::parse(text) {
                Ok(path) => paths.push(path),
                Err(why) => walk.problems.push(
                    Problem::new(join(&at, "paths"), Some(format!("{text:?}")), why)
                        .fix("paths = [\"$.card.number\", \"$..password\", \"$.lines[*].price\"]"),
                ),
            }
        }
        if !mask.hide && mask.paths.is_empty() && mask.headers.is_empty() {
            let problem = Problem::new(&at, None, "hides nothing");
            walk.problems.push(problem.fix("give it hide = true, or paths, or headers"));
        }
        masks.push(Mask {
            destinations: mask.destinations.clone(),
            consumers: mask.consumers.clone(),
            hide: mask.hide,
            paths,
            headers: mask.headers.iter().map(|h| h.to_ascii_lowercase()).collect(),
        });
        written.push(mask);
    }
    (written, Masks(masks))
}
