//! fio: the measured cases, the scripts that run it on a VM, and its output.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// A kind of load.
pub(super) struct Case {
    pub(super) name: &'static str,
    arguments: &'static str,
    direction: Direction,
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

const fn case(name: &'static str, direction: Direction, arguments: &'static str) -> Case {
    Case { name, arguments, direction }
}

/// The measured cases. An operation of the last one is a write and the fsync after it.
pub(super) const CASES: [Case; 7] = [
    case("random read 4 KiB, depth 1", Direction::Read, "--rw=randread --bs=4k --iodepth=1"),
    case("random read 4 KiB, depth 32", Direction::Read, "--rw=randread --bs=4k --iodepth=32"),
    case("random write 4 KiB, depth 1", Direction::Write, "--rw=randwrite --bs=4k --iodepth=1"),
    case("random write 4 KiB, depth 32", Direction::Write, "--rw=randwrite --bs=4k --iodepth=32"),
    case("sequential read 1 MiB", Direction::Read, "--rw=read --bs=1m --iodepth=4"),
    case("sequential write 1 MiB", Direction::Write, "--rw=write --bs=1m --iodepth=4"),
    case("write 4 KiB and fsync", Direction::Write, "--rw=randwrite --bs=4k --iodepth=1 --fsync=1"),
];

/// What one run of fio measured.
pub(super) struct Sample {
    /// Time per operation: the inverse of the throughput.
    pub(super) duration: Duration,
    /// Median latency.
    pub(super) latency: Duration,
}

/// Fields of fio's terse output, version 3: the error, and the operations per second and the median latency in µs of reads
/// and of writes.
const FIELDS: &str = "5,8,24,49,65";

impl Case {
    /// Parses the fields that a run printed.
    pub(super) fn sample(&self, line: &str) -> Result<Sample> {
        let unexpected = || format!("{}: unexpected output of fio: {line:?}", self.name);
        let fields: Vec<&str> = line.split(';').collect();
        let [error, read_rate, read_latency, write_rate, write_latency] = fields[..] else {
            anyhow::bail!(unexpected());
        };
        ensure!(error == "0", unexpected());
        let (rate, latency) = match self.direction {
            Direction::Read => (read_rate, read_latency),
            Direction::Write => (write_rate, write_latency),
        };
        let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0);
        let rate = number(rate).with_context(unexpected)?;
        let latency = latency.strip_prefix("50.000000%=").and_then(number).with_context(unexpected)?;
        Ok(Sample {
            duration: Duration::from_secs_f64(1.0 / rate),
            latency: Duration::from_secs_f64(latency / 1e6),
        })
    }
}

/// A script that has fio from the disk with this serial, and the functions `disk` and `fio`.
pub(super) fn with_tools(serial: &str, script: &str) -> String {
    format!(
        "disk() {{
            page=$(grep -la \"$1\" /sys/block/sd*/device/vpd_pg80)
            echo /dev/$(echo $page | cut -d/ -f4)
        }}
        fio() {{ /run/fio/ld.so --library-path /run/fio /run/fio/fio \"$@\"; }}
        mkdir -p /run/fio
        mount -o ro $(disk {serial}) /run/fio
        trap 'umount /run/fio' EXIT
        {script}"
    )
}

/// Writes the disks completely, so that no measured write allocates.
pub(super) fn fill(disks: &[&str]) -> String {
    let one = |disk: &&str| {
        format!(
            "fio --name=fill --filename=$(disk {disk}) --direct=1 --rw=write --bs=1m --output=/dev/null\n"
        )
    };
    disks.iter().map(one).collect()
}

/// Runs each case on the disks in this order, and prints a line for each run.
pub(super) fn measure(disks: &[&str], order: &[usize], seconds: u32) -> String {
    let run = |case: &Case, disk: usize| {
        format!(
            "fio --name=io --filename=$(disk {}) --direct=1 --ioengine=io_uring {} --time_based --runtime={seconds} \
             --ramp_time=1 --randrepeat=0 --output-format=terse --terse-version=3 | cut -d';' -f{FIELDS}\n",
            disks[disk], case.arguments
        )
    };
    CASES.iter().flat_map(|case| order.iter().map(|disk| run(case, *disk))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_fio_is_rate_and_median_latency() {
        let read = CASES[0].sample("0;2000;50.000000%=450;0;50.000000%=0").unwrap();
        assert_eq!((read.duration, read.latency), (Duration::from_micros(500), Duration::from_micros(450)));
        let write = CASES[2].sample("0;0;50.000000%=0;1000;50.000000%=900").unwrap();
        assert_eq!(write.duration, Duration::from_millis(1));
    }

    #[test]
    fn an_error_of_fio_or_no_operation_is_no_sample() {
        for line in ["", "5;2000;50.000000%=450;0;0", "0;0;50.000000%=0;0;0", "0;fast;50.000000%=1;0;0"] {
            assert!(CASES[0].sample(line).is_err(), "{line}");
        }
    }
}
