//! Command line of `mgmt-csi`: the driver, and the subcommand `orphans`.

use std::process::ExitCode;

use clap::{Args, Command, FromArgMatches};
use mgmt_csi::{app, repair::orphans};
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

/// The driver's flags are required only without a subcommand.
fn command() -> Command {
    let about =
        "Lists unused objects of the management cluster and the storage infra, and removes them on request";
    let orphans = orphans::Args::augment_args(Command::new("orphans").about(about));
    let driver = Command::new("mgmt-csi")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Nestor's CSI driver for the management cluster")
        .subcommand_negates_reqs(true)
        .subcommand(orphans);
    let driver = app::Args::augment_args(driver);
    let driver = TraceArgs::augment_args(driver.next_help_heading("Traces"));
    flags::with_env(LogArgs::augment_args(driver.next_help_heading("Logs")))
}

fn main() -> ExitCode {
    let matches = command().get_matches();
    let invocation = match matches.subcommand() {
        Some((_, matches)) => orphans::Args::from_arg_matches(matches).map(Invocation::Orphans),
        None => app::Args::from_arg_matches(&matches)
            .and_then(|args| Ok(Invocation::Driver(Box::new(args), TraceArgs::from_arg_matches(&matches)?))),
    };
    let logs = LogArgs::from_arg_matches(matches.subcommand().map_or(&matches, |(_, matches)| matches));
    let (invocation, logs) = match (invocation, logs) {
        (Ok(invocation), Ok(logs)) => (invocation, logs),
        (Err(error), _) | (_, Err(error)) => error.format(&mut command()).exit(),
    };
    match invocation {
        Invocation::Driver(args, traces) => {
            process::run_traced(&logs, || traces.start("mgmt-csi"), 2, |stop| app::run(*args, stop))
        }
        Invocation::Orphans(args) => process::run(&logs, 1, |_| orphans::run(args)),
    }
}

/// The parsed command.
enum Invocation {
    Driver(Box<app::Args>, TraceArgs),
    Orphans(orphans::Args),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_documented_and_the_subcommand_does_not_require_those_of_the_driver() {
        command().debug_assert();
        assert_eq!(flags::faults(&command()), [""; 0]);
        let infra = ["--infra-url=https://i", "--infra-ca=a", "--infra-cert=b", "--infra-key=c"];
        let read = |words: &[&str]| command().try_get_matches_from([&["mgmt-csi"], words].concat());
        assert!(read(&infra).is_err(), "the driver needs a socket");
        assert!(read(&[&["--endpoint=unix:///x"], &infra[..]].concat()).is_ok());
        let orphans = |words: &[&str]| read(&[&["orphans"], &infra[..], words].concat());
        assert!(orphans(&[]).is_ok());
        assert!(orphans(&["--remove"]).is_err(), "--remove requires --older-than");
        let matches = orphans(&["--remove", "--older-than=30d", "--dry-run=false"]).unwrap();
        let (_, matches) = matches.subcommand().unwrap();
        assert!(orphans::Args::from_arg_matches(matches).is_ok());
    }
}
