//! `posthouse demo`.

use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// How many orders to place
    #[arg(long, default_value_t = 500)]
    pub(crate) orders: u32,
    /// Makes the run repeatable
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Keep the demo's tables
    #[arg(long)]
    pub(crate) keep: bool,
    /// One JSON document on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn run(args: DemoArgs) -> ExitCode {
    eprintln!("error: the demo ({args:?}) is not part of this build");
    ExitCode::from(2)
}
