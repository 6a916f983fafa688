//! Which hypervisor has a virtual machine, by what all of them report about its UUID. Pure.

use crate::hypervisor::Power;

/// What a hypervisor reports about a virtual machine, or why it does not respond.
pub(super) type Report = (String, Result<Power, String>);

/// Where a virtual machine is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// On this hypervisor.
    At(String),
    /// On none.
    Nowhere,
    /// On several: they disagree about where it is.
    Ambiguous(Vec<String>),
    /// It may be on a hypervisor that does not respond.
    Unknown(String),
}

/// The hypervisor that runs the virtual machine, or else the one that has it while it does not run. A running one is
/// believed even if another hypervisor does not respond, one that does not run is not.
pub(super) fn locate(reports: &[Report]) -> Location {
    let with = |matches: fn(&Power) -> bool| -> Vec<String> {
        let has = |report: &&Report| report.1.as_ref().is_ok_and(matches);
        reports.iter().filter(has).map(|(name, _)| name.clone()).collect()
    };
    let unknown = reports.iter().find_map(|(name, report)| Some((name, report.as_ref().err()?)));
    match (&*with(is_running), unknown) {
        ([one], _) => return Location::At(one.clone()),
        ([], Some((name, why))) => return Location::Unknown(format!("{name}: {why}")),
        ([], None) => {}
        (several, _) => return Location::Ambiguous(several.to_vec()),
    }
    match &*with(|power| *power != Power::Gone) {
        [] => Location::Nowhere,
        [one] => Location::At(one.clone()),
        several => Location::Ambiguous(several.to_vec()),
    }
}

/// The hypervisor to which a registered virtual machine has moved by itself: it does not run on its own, and runs on
/// exactly one other.
pub(super) fn moved_to(own: &Result<Power, String>, others: &[Report]) -> Option<String> {
    if own.as_ref().is_ok_and(|power| is_running(power) || matches!(power, Power::Saved { .. })) {
        return None;
    }
    let mut running = others.iter().filter(|(_, report)| report.as_ref().is_ok_and(is_running));
    let (name, _) = running.next()?;
    running.next().is_none().then(|| name.clone())
}

fn is_running(power: &Power) -> bool {
    matches!(power, Power::Running { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: Power = Power::Running { executing: true };
    const OFF: Power = Power::Off { shut_down: true };
    const SAVED: Power = Power::Saved { managed: true };

    fn reports(all: &[(&str, Result<Power, &str>)]) -> Vec<Report> {
        all.iter().map(|(name, report)| ((*name).into(), report.map_err(str::to_owned))).collect()
    }

    #[test]
    fn the_one_that_runs_it_has_it_whatever_the_others_report() {
        let at = |all: &[_]| locate(&reports(all)) == Location::At("a".into());
        assert!(at(&[("a", Ok(RUNNING)), ("b", Ok(Power::Gone))]));
        assert!(at(&[("a", Ok(RUNNING)), ("b", Ok(OFF))]));
        assert!(at(&[("a", Ok(RUNNING)), ("b", Err("down"))]));
        assert!(at(&[("a", Ok(OFF)), ("b", Ok(Power::Gone))]));
        assert!(at(&[("a", Ok(SAVED))]));
    }

    #[test]
    fn nothing_is_guessed() {
        let two = |all: &[_]| locate(&reports(all)) == Location::Ambiguous(vec!["a".into(), "b".into()]);
        assert!(two(&[("a", Ok(RUNNING)), ("b", Ok(RUNNING))]));
        assert!(two(&[("a", Ok(OFF)), ("b", Ok(SAVED))]));
        let down = Location::Unknown("b: down".into());
        assert_eq!(locate(&reports(&[("a", Ok(OFF)), ("b", Err("down"))])), down);
        assert_eq!(locate(&reports(&[("a", Ok(Power::Gone)), ("b", Err("down"))])), down);
        assert_eq!(locate(&reports(&[("a", Ok(Power::Gone))])), Location::Nowhere);
        assert_eq!(locate(&[]), Location::Nowhere);
    }

    #[test]
    fn a_registered_one_moves_only_to_where_it_runs() {
        let moved =
            |own: Result<Power, &str>, others: &[_]| moved_to(&own.map_err(str::to_owned), &reports(others));
        assert_eq!(moved(Ok(RUNNING), &[("b", Ok(RUNNING))]), None);
        assert_eq!(moved(Ok(SAVED), &[("b", Ok(RUNNING))]), None);
        assert_eq!(moved(Ok(Power::Gone), &[("b", Ok(OFF)), ("c", Err("down"))]), None);
        assert_eq!(moved(Ok(Power::Gone), &[("b", Ok(RUNNING)), ("c", Ok(RUNNING))]), None);
        for own in [Ok(Power::Gone), Ok(OFF), Err("down")] {
            assert_eq!(moved(own, &[("b", Ok(RUNNING)), ("c", Ok(OFF))]).as_deref(), Some("b"));
        }
    }
}
