//! The lottery with real databases and a broker; the books are settled at the end.

use std::process::Command;

#[test]
fn every_prize_is_delivered_once() {
    let scale: u32 = std::env::var("POSTHOUSE_TEST_SCALE").map_or(1, |scale| scale.parse().expect("POSTHOUSE_TEST_SCALE"));
    let topic = format!("lottery_invoice_{:08x}", fastrand::u32(..));
    let output = Command::new(env!("CARGO_BIN_EXE_lottery"))
        .args(["--prizes", &(120 * scale * scale).to_string(), "--topic", &topic, "--deadline", &(120 * scale).to_string()])
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    assert!(output.status.success() && out.contains("the books balance"), "{}\n{out}\n{err}", output.status);
}
