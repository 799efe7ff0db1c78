//! Both services with real databases and brokers, and faults; the books of both databases are settled at the end.

use std::process::Command;

/// More orders and faults on demand: ten times as many orders are the full size.
fn scale() -> u32 {
    std::env::var("POSTHOUSE_TEST_SCALE").map_or(1, |scale| scale.parse().expect("POSTHOUSE_TEST_SCALE"))
}

fn books_balance_over(broker: &str) {
    let (orders, kills, restarts) = if scale() == 1 { (400, 2, 1) } else { (2_000 * scale(), 3 * scale(), 5) };
    let output = Command::new(env!("CARGO_BIN_EXE_faults"))
        .args(["--broker", broker, "--orders", &orders.to_string(), "--kills", &kills.to_string()])
        .args(["--broker-restarts", &restarts.to_string(), "--order-kills", "1", "--deadline", &(240 * scale()).to_string()])
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    assert!(output.status.success() && out.contains("the books balance"), "{}\n{out}\n{err}", output.status);
}

#[test]
fn every_order_is_taken_from_the_stock_once_over_rabbitmq() {
    books_balance_over("rabbitmq");
}

#[test]
fn every_order_is_taken_from_the_stock_once_over_kafka() {
    books_balance_over("kafka");
}
