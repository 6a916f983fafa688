//! Plan of one user: operations drawn from a seed, and the expected state after each. The same seed gives the same
//! operations, independent of their durations.

use std::collections::BTreeMap;

use fastrand::Rng;

/// Number of nodes of a user.
pub const VMS: usize = 2;
const VOLUMES: usize = 4;
const SNAPSHOTS: usize = 3;
const LARGEST_MIB: i64 = 32;

/// A number of a volume or snapshot, used only once.
pub type Number = u64;

/// The expected records: the volume that they were first written to, and their number.
pub type Records = Option<(Number, u64)>;

/// The expected state of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub mib: i64,
    pub records: Records,
    /// The node that it is attached to.
    pub at: Option<usize>,
}

/// The expected state of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub mib: i64,
    pub records: Records,
}

/// An operation of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    Create {
        volume: Number,
        mib: i64,
    },
    Restore {
        volume: Number,
        snapshot: Number,
        mib: i64,
    },
    Clone {
        volume: Number,
        source: Number,
        mib: i64,
    },
    Attach {
        volume: Number,
        vm: usize,
    },
    /// An attach of an attached volume to a second node, which must be refused.
    Contend {
        volume: Number,
        vm: usize,
    },
    Write {
        volume: Number,
        records: u64,
    },
    Verify {
        volume: Number,
    },
    Expand {
        volume: Number,
        mib: i64,
    },
    Detach {
        volume: Number,
        vm: usize,
    },
    Delete {
        volume: Number,
    },
    Snapshot {
        snapshot: Number,
        volume: Number,
    },
    DeleteSnapshot {
        snapshot: Number,
    },
}

/// A user's operations and the expected state.
#[derive(Debug)]
pub struct Plan {
    random: Rng,
    next: Number,
    pub volumes: BTreeMap<Number, Volume>,
    pub snapshots: BTreeMap<Number, Snapshot>,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let (volumes, snapshots) = (BTreeMap::new(), BTreeMap::new());
        Self { random: Rng::with_seed(seed), next: 0, volumes, snapshots }
    }

    /// Draws the next operation. The caller executes it and then calls [`Self::done`].
    pub fn next(&mut self) -> Operation {
        let mut possible = Vec::new();
        let fresh = self.next;
        if self.volumes.len() < VOLUMES {
            possible.push(Operation::Create { volume: fresh, mib: self.random.i64(4..=8) });
            for (snapshot, of) in &self.snapshots {
                let mib = of.mib + self.random.i64(0..=2);
                possible.push(Operation::Restore { volume: fresh, snapshot: *snapshot, mib });
            }
        }
        for (number, volume) in &self.volumes {
            let number = *number;
            match volume.at {
                None => {
                    let vm = self.random.usize(0..VMS);
                    // Twice as likely, because most failures involve attached disks.
                    possible.extend([(); 2].map(|()| Operation::Attach { volume: number, vm }));
                    possible.push(Operation::Delete { volume: number });
                }
                Some(vm) => {
                    let records = self.random.u64(1..=16);
                    possible.extend([(); 2].map(|()| Operation::Write { volume: number, records }));
                    possible.push(Operation::Contend { volume: number, vm: (vm + 1) % VMS });
                    possible.push(Operation::Detach { volume: number, vm });
                }
            }
            possible.push(Operation::Verify { volume: number });
            let mib = volume.mib + self.random.i64(1..=4);
            if mib <= LARGEST_MIB {
                possible.push(Operation::Expand { volume: number, mib });
            }
            if self.snapshots.len() < SNAPSHOTS {
                possible.push(Operation::Snapshot { snapshot: fresh, volume: number });
            }
            if self.volumes.len() < VOLUMES {
                possible.push(Operation::Clone { volume: fresh, source: number, mib: volume.mib });
            }
        }
        possible.extend(self.snapshots.keys().map(|number| Operation::DeleteSnapshot { snapshot: *number }));
        possible.swap_remove(self.random.usize(..possible.len()))
    }

    /// Updates the expected state after an operation.
    pub fn done(&mut self, operation: &Operation) {
        let Self { next, volumes, snapshots, .. } = self;
        let made = |mib: i64, records: Records| Volume { mib, records, at: None };
        match *operation {
            Operation::Create { volume, mib } => {
                volumes.insert(volume, made(mib, None));
                *next += 1;
            }
            Operation::Restore { volume, snapshot, mib } => {
                volumes.insert(volume, made(mib, snapshots[&snapshot].records));
                *next += 1;
            }
            Operation::Clone { volume, source, mib } => {
                volumes.insert(volume, made(mib, volumes[&source].records));
                *next += 1;
            }
            Operation::Snapshot { snapshot, volume } => {
                let Volume { mib, records, .. } = volumes[&volume];
                snapshots.insert(snapshot, Snapshot { mib, records });
                *next += 1;
            }
            Operation::Attach { volume, vm } => of(volumes, volume).at = Some(vm),
            Operation::Detach { volume, .. } => of(volumes, volume).at = None,
            Operation::Write { volume, records } => {
                let written = &mut of(volumes, volume).records;
                // Writing replaces the records that a clone or restored volume started with.
                let own = written.filter(|(writer, _)| *writer == volume).map_or(0, |(_, own)| own);
                *written = Some((volume, own + records));
            }
            Operation::Expand { volume, mib } => of(volumes, volume).mib = mib,
            Operation::Delete { volume } => drop(volumes.remove(&volume)),
            Operation::DeleteSnapshot { snapshot } => drop(snapshots.remove(&snapshot)),
            Operation::Verify { .. } | Operation::Contend { .. } => {}
        }
    }

    /// The operations that remove everything that is left.
    pub fn end(&self) -> Vec<Operation> {
        let mut all = Vec::new();
        for (number, volume) in &self.volumes {
            let volume_number = *number;
            all.push(Operation::Verify { volume: volume_number });
            if let Some(vm) = volume.at {
                all.push(Operation::Detach { volume: volume_number, vm });
                all.push(Operation::Verify { volume: volume_number });
            }
            all.push(Operation::Delete { volume: volume_number });
        }
        all.extend(self.snapshots.keys().map(|number| Operation::DeleteSnapshot { snapshot: *number }));
        all
    }
}

#[allow(clippy::unwrap_used, reason = "an operation on a volume that does not exist is a bug in this file")]
fn of(volumes: &mut BTreeMap<Number, Volume>, number: Number) -> &mut Volume {
    volumes.get_mut(&number).unwrap()
}

#[test]
fn a_seed_gives_the_same_operations_each_time() {
    let operations = |seed| {
        let mut plan = Plan::new(seed);
        let mut all = Vec::new();
        for _ in 0..500 {
            let operation = plan.next();
            plan.done(&operation);
            all.push(operation);
        }
        all
    };
    assert_eq!(operations(7), operations(7));
    assert_ne!(operations(7), operations(8));
}
