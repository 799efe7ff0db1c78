//! The executor for an XXL-JOB admin: its settings.

use crate::config::{one, print, problems};

const DATABASE: &str = "[databases.a]\nurl = \"postgres://u@h/d\"\n";
const GOOD: &str = "[xxl_job]\nadmins = [\"http://admin.example/xxl-job-admin\"]\napp_name = \"posthouse\"\n";

#[test]
fn everything_wrong_with_the_section_is_told_at_once() {
    let found = problems(&format!(
        "{DATABASE}[xxl_job]\nadmins = [\"admin.example\", \"http://a/?x=1\"]\napp_name = \"two words\"\nlisten = \"localhost\"\n\
         advertise = \"posthouse.example:9999\"\ndata_dir = \"\"\nlog_retention = \"5m\"\ncallback_retry = \"1ms\"\nlogdir = 1\n"
    ));
    let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "xxl_job.access_token",
            "xxl_job.admins",
            "xxl_job.admins",
            "xxl_job.advertise",
            "xxl_job.app_name",
            "xxl_job.callback_retry",
            "xxl_job.data_dir",
            "xxl_job.listen",
            "xxl_job.log_retention",
            "xxl_job.logdir",
        ],
        "{found:#?}"
    );
    let none = problems(&format!("{DATABASE}[xxl_job]\n"));
    let paths: Vec<&str> = none.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["xxl_job.access_token", "xxl_job.admins", "xxl_job.app_name"], "{none:?}");
    assert!(none.iter().all(|(_, why)| why.contains("is missing")), "{none:?}");
}

#[test]
fn a_mistyped_key_is_told_once() {
    one(
        "[xxl_job]\nadmin = [\"http://a/\"]\napp_name = \"x\"\naccess_token = \"t\"",
        "xxl_job.admin",
        &["did you mean \"admins\"?"],
    );
    one(&format!("{GOOD}acces_token = \"t\""), "xxl_job.acces_token", &["did you mean \"access_token\"?"]);
    one(&format!("{GOOD}access_token = 5"), "xxl_job.access_token", &["must be text in quotes"]);
}

#[test]
fn the_door_has_a_lock_unless_somebody_says_that_it_has_none() {
    for (token, word) in
        [("", "is missing"), ("access_token = \"\"", "is empty"), ("access_token = \"default_token\"", "everybody knows")]
    {
        one(&format!("{GOOD}{token}"), "xxl_job.access_token", &[word, "allow_anonymous = true"]);
        let allowed = print(&format!("{DATABASE}{GOOD}{token}\nallow_anonymous = true")).code(0);
        assert!(!allowed.stdout.contains("default_token"), "{}", allowed.stdout);
    }
    one(&format!("{GOOD}access_token = \"a\\nb\""), "xxl_job.access_token", &["HTTP header"]);
    one(&format!("{GOOD}access_token = \" a\""), "xxl_job.access_token", &["HTTP header"]);
    print(&format!("{DATABASE}{GOOD}access_token = \"t\"")).code(0);
}

#[test]
fn an_address_that_cannot_be_told_to_the_admin_needs_another() {
    let public = format!("{GOOD}access_token = \"t\"\nlisten = \"0.0.0.0:9999\"\n");
    one(&public, "xxl_job.advertise", &["is missing", "0.0.0.0"]);
    print(&format!("{DATABASE}{public}advertise = \"http://posthouse.example:9999\"")).code(0);
    print(&format!("{DATABASE}{GOOD}access_token = \"t\"\nlisten = \"10.1.2.3:9999\"")).code(0);
}

#[test]
fn what_is_in_effect_is_shown_without_secrets() {
    let text = format!(
        "{DATABASE}[xxl_job]\nadmins = [\"http://u:hunter2@admin.example/xxl-job-admin\"]\napp_name = \"posthouse\"\naccess_token = \"hunter2\"\n"
    );
    let shown = print(&text).code(0);
    for line in [
        "listen = \"127.0.0.1:9999\"",
        "log_retention = \"30days\"",
        "callback_retry = \"30s\"",
        "data_dir = \"xxl-job\"",
        "allow_anonymous = false",
        "access_token = \"[redacted]\"",
    ] {
        assert!(shown.stdout.contains(line), "{line}: {}", shown.stdout);
    }
    assert!(!shown.stdout.contains("hunter2"), "{}", shown.stdout);
    let wrong = print(&text.replace("http://u", "htp://u").replace("app_name", "app_nam")).code(2);
    assert!(!wrong.stderr.contains("hunter2") && wrong.stderr.contains("[redacted]"), "{}", wrong.stderr);
    assert!(!print(DATABASE).code(0).stdout.contains("xxl_job"), "nothing is there without the section");
}
