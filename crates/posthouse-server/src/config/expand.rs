//! `${VAR}`, `${VAR:-default}` and `${file:/run/secrets/x}` in the text of the configuration.

/// A file given for one setting is no larger than this; more is a mistake such as a device or a log.
const LARGEST_FILE: u64 = 1 << 20;

/// Replaces what stands in `${…}`; `$${` is a plain `${`. Every problem is told, each as (reason, fix).
pub(super) fn expand(text: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, Vec<(String, String)>> {
    let mut out = String::with_capacity(text.len());
    let mut problems = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            out.push_str(&rest[..at]);
            out.push('{');
            rest = &rest[at + 2..];
            continue;
        }
        out.push_str(&rest[..at]);
        let after = &rest[at + 2..];
        let Some(end) = after.find('}') else {
            problems.push(("\"${\" has no closing \"}\"".into(), "write ${NAME}, or $${ for a plain ${".into()));
            rest = "";
            break;
        };
        match resolve(&after[..end], env) {
            Ok(value) => out.push_str(&value),
            Err(problem) => problems.push(problem),
        }
        rest = &after[end + 1..];
    }
    out.push_str(rest);
    if problems.is_empty() { Ok(out) } else { Err(problems) }
}

fn resolve(inside: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, (String, String)> {
    if let Some(file) = inside.strip_prefix("file:") {
        return read(file)
            .map_err(|why| (format!("the file {file:?} {why}"), "check the path and that this user may read it".into()));
    }
    let (name, default) = match inside.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inside, None),
    };
    let valid =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !name.as_bytes()[0].is_ascii_digit();
    if !valid {
        return Err((
            "\"${…}\" holds no variable name".into(),
            "write ${NAME}, ${NAME:-default} or ${file:/path}; $${ is a plain ${".into(),
        ));
    }
    // As in a shell, `:-` also stands in for an empty variable.
    match (env(name), default) {
        (Some(value), None) => Ok(value),
        (Some(value), Some(_)) if !value.is_empty() => Ok(value),
        (_, Some(default)) => Ok(default.to_owned()),
        (None, None) => {
            Err((format!("the environment variable {name} is not set"), format!("set {name}, or give a default: ${{{name}:-…}}")))
        }
    }
}

fn read(path: &str) -> Result<String, String> {
    let told = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        std::io::ErrorKind::PermissionDenied => "may not be read by this user".to_owned(),
        _ => format!("can't be read: {e}"),
    };
    let meta = std::fs::metadata(path).map_err(told)?;
    if !meta.is_file() {
        return Err("is not a file".into());
    }
    if meta.len() > LARGEST_FILE {
        return Err("is larger than 1 MiB".into());
    }
    let bytes = std::fs::read(path).map_err(told)?;
    let text = String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".to_owned())?;
    // Editors and `echo` end a file with a line break; it is no part of the secret.
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Ok(text.strip_suffix('\r').unwrap_or(text).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        match name {
            "A" => Some("1".into()),
            "EMPTY" => Some(String::new()),
            "NESTED" => Some("${A}".into()),
            _ => None,
        }
    }

    #[test]
    fn variables_defaults_and_the_escape() {
        for (text, expected) in [
            ("x${A}y${A}", "x1y1"),
            ("${B:-d}", "d"),
            ("${EMPTY:-d}", "d"),
            ("${EMPTY}", ""),
            ("${B:-}", ""),
            ("$A $$ $", "$A $$ $"),
            ("$${A}", "${A}"),
            ("${NESTED}", "${A}"),
        ] {
            assert_eq!(expand(text, &env).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn every_missing_variable_is_named() {
        let all = expand("${B} ${A} ${C} ${", &env).unwrap_err();
        assert_eq!(all.len(), 3);
        assert!(all[0].0.contains(" B ") && all[1].0.contains(" C "), "{all:?}");
        assert!(expand("${}", &env).is_err() && expand("${1}", &env).is_err() && expand("${a b}", &env).is_err());
    }
}
