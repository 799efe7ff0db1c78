//! A length of time, or `"never"` for none: a file has no null.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Never(Never),
    After(#[serde(with = "humantime_serde")] Duration),
}

#[derive(Deserialize)]
enum Never {
    #[serde(rename = "never")]
    Never,
}

pub(super) fn serialize<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(d) => humantime_serde::serialize(d, serializer),
        None => serializer.serialize_str("never"),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    match Option::<Written>::deserialize(deserializer) {
        Ok(Some(Written::After(d))) => Ok(Some(d)),
        Ok(Some(Written::Never(Never::Never)) | None) => Ok(None),
        Err(_) => Err(serde::de::Error::custom("write a length of time such as \"15d\", or \"never\"")),
    }
}
