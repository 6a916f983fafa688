//! Whether a VM that its own hypervisor reports as off may have a disk on another one. Pure.

use crate::hypervisor::Power;

/// What another hypervisor reports about the VM.
pub(super) struct Elsewhere {
    /// Name of the hypervisor.
    pub(super) name: String,
    /// Whether its host reaches the pool of the disk. Also true if the question is not about one disk.
    pub(super) reaches: bool,
    /// The power state, and whether the VM shows the disk there; or why the hypervisor does not respond.
    pub(super) report: Result<(Power, bool), String>,
}

/// Why the VM may have the disk there; `None` if it does not. Every host that reaches the pool must say so. One that does not
/// reach the pool has no data of it, and is not waited for.
pub(super) fn may_have(one: &Elsewhere) -> Option<String> {
    let name = &one.name;
    match &one.report {
        Ok((Power::Off { .. } | Power::Gone, _)) => None,
        Ok((_, has_disk)) if !one.reaches && !has_disk => None,
        Ok((power, _)) => Some(format!("is {} on hypervisor {name}", power.state())),
        Err(_) if !one.reaches => None,
        Err(why) => Some(format!("may run on hypervisor {name}, which does not answer: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: Power = Power::Running { executing: true };
    const ARRIVING: Power = Power::Running { executing: false };
    const SAVED: Power = Power::Saved { managed: true };
    const OFF: Power = Power::Off { shut_down: false };

    fn may(reaches: bool, report: Result<(Power, bool), &str>) -> Option<String> {
        may_have(&Elsewhere { name: "b".into(), reaches, report: report.map_err(str::to_owned) })
    }

    #[test]
    fn every_host_that_reaches_the_pool_must_say_that_the_vm_is_off() {
        for off in [OFF, Power::Gone] {
            assert_eq!(may(true, Ok((off, false))), None);
        }
        for on in [RUNNING, ARRIVING, SAVED] {
            assert!(may(true, Ok((on, false))).unwrap().contains("hypervisor b"));
        }
        assert!(may(true, Err("down")).unwrap().contains("does not answer: down"));
    }

    #[test]
    fn a_host_that_does_not_reach_the_pool_counts_only_if_it_shows_the_disk() {
        assert_eq!(may(false, Err("down")), None);
        assert_eq!(may(false, Ok((RUNNING, false))), None);
        assert!(may(false, Ok((RUNNING, true))).unwrap().contains("running on hypervisor b"));
    }
}
