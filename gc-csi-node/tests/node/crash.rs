//! The driver dies before and after each change that it makes to the machine, and while each tool runs, and is started
//! again: as kubelet repeats its calls, everything is mounted once, and what was written is there.
//!
//! The cases are made of what an undisturbed life of a volume passed, so that a new change has its cases without anyone
//! adding them. In each further life, the driver dies once in every call that has a case left.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use csi::proto::volume_capability::access_mode::Mode;
use tonic::Status;

use crate::growth::ext4_grows_online;
use crate::machine::{Disk, Machine, block, filesystem};

/// How long a call may be repeated.
const PATIENCE: Duration = Duration::from_secs(120);
/// What a pod writes.
static KEPT: [u8; 64 << 10] = [b'k'; 64 << 10];
/// How long kubelet waits at least before it repeats a call.
const PACE: Duration = Duration::from_millis(50);

/// A call of kubelet, in the order of a volume's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Call {
    Stage,
    Publish,
    PublishReadOnly,
    Expand,
    UnpublishReadOnly,
    Unpublish,
    Unstage,
    StageAgain,
    UnstageAgain,
}

use Call::{
    Expand, Publish, PublishReadOnly, Stage, StageAgain, Unpublish, UnpublishReadOnly, Unstage, UnstageAgain,
};

const LIFE: [Call; 9] = [
    Stage,
    Publish,
    PublishReadOnly,
    Expand,
    UnpublishReadOnly,
    Unpublish,
    Unstage,
    StageAgain,
    UnstageAgain,
];

/// A point, and at which passing of it, from 1.
type Place = (String, usize);

/// A volume on its way through its life.
struct Life<'a> {
    machine: &'a mut Machine,
    disk: Disk,
    /// None for a block volume.
    fs_type: Option<&'static str>,
    mib: u64,
}

#[tokio::test]
async fn an_ext4_volume_lives_wherever_the_driver_dies() {
    lives(Some("ext4"), 16).await;
}

#[tokio::test]
async fn an_xfs_volume_lives_wherever_the_driver_dies() {
    lives(Some("xfs"), 320).await;
}

#[tokio::test]
async fn a_btrfs_volume_lives_wherever_the_driver_dies() {
    lives(Some("btrfs"), 128).await;
}

#[tokio::test]
async fn a_block_volume_lives_wherever_the_driver_dies() {
    lives(None, 8).await;
}

async fn lives(fs_type: Option<&'static str>, mib: u64) {
    let mut machine = Machine::start().await;
    let is_possible = |call: &Call| *call != Expand || fs_type != Some("ext4") || ext4_grows_online();
    let calls: Vec<Call> = LIFE.into_iter().filter(is_possible).collect();
    let mut life = Life::begin(&mut machine, fs_type, mib);
    let mut cases = Vec::new();
    for call in calls.iter().copied() {
        std::fs::write(life.file("passed"), "").unwrap();
        life.insist(call, None).await;
        life.check(call, None);
        let passed = std::fs::read_to_string(life.file("passed")).unwrap();
        std::fs::remove_file(life.file("passed")).unwrap();
        cases.push(places(&passed));
    }
    life.end();
    let (points, total) = (
        cases.iter().flatten().map(|(point, _)| point).collect::<BTreeSet<_>>().len(),
        cases.iter().map(Vec::len).sum::<usize>(),
    );
    assert!(points > 0, "the driver has no fail points: is it built with debug assertions?");
    let begun = Instant::now();
    let mut cases: Vec<_> = cases.into_iter().map(Vec::into_iter).collect();
    while cases.iter().any(|left| left.len() > 0) {
        let mut life = Life::begin(&mut machine, fs_type, mib);
        for (call, left) in calls.iter().copied().zip(&mut cases) {
            let place = left.next();
            life.insist(call, place.as_ref()).await;
            life.check(call, place.as_ref());
        }
        life.end();
    }
    eprintln!(
        "{total} crashes at {points} points in {} calls for a volume with {}: {:.0} s",
        calls.len(),
        fs_type.unwrap_or("no filesystem"),
        begun.elapsed().as_secs_f64()
    );
}

/// What was passed, each with how often it was by then.
fn places(passed: &str) -> Vec<Place> {
    let mut counts = BTreeMap::new();
    let count = |point: &str| {
        let count = counts.entry(point.to_owned()).or_insert(0);
        *count += 1;
        (point.to_owned(), *count)
    };
    passed.lines().map(count).collect()
}

impl<'a> Life<'a> {
    fn begin(machine: &'a mut Machine, fs_type: Option<&'static str>, mib: u64) -> Self {
        let disk = machine.disk(mib);
        Self { machine, disk, fs_type, mib }
    }

    fn end(self) {
        self.machine.remove(&self.disk);
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.machine.path("fail-points").join(name)
    }

    async fn take(&self, call: Call) -> Result<(), Status> {
        let Self { machine, disk, .. } = self;
        let wanted = || match self.fs_type {
            Some(fs_type) => filesystem(fs_type, Mode::SingleNodeMultiWriter),
            None => block(Mode::SingleNodeMultiWriter),
        };
        match call {
            Stage | StageAgain => machine.stage(disk, wanted()).await,
            Publish => machine.publish(disk, "one", wanted(), false).await.map(drop),
            PublishReadOnly => machine.publish(disk, "two", wanted(), true).await.map(drop),
            Expand => {
                machine.enlarge(disk, 2 * self.mib);
                let size = machine.expand(disk, &machine.target(disk, "one"), 2 * self.mib).await?;
                assert_eq!(size, i64::try_from((2 * self.mib) << 20).unwrap());
                Ok(())
            }
            UnpublishReadOnly => machine.unpublish(disk, "two").await,
            Unpublish => machine.unpublish(disk, "one").await,
            Unstage | UnstageAgain => machine.unstage(disk).await,
        }
    }

    /// Calls until it is done, as kubelet does whatever the answer was. Where there is a place, the driver dies there
    /// once on the way.
    async fn insist(&mut self, call: Call, place: Option<&Place>) {
        let armed = self.file("armed");
        if let Some((point, count)) = place {
            std::fs::write(&armed, format!("{point} {count}")).unwrap();
        }
        let (deadline, mut died) = (Instant::now() + PATIENCE, false);
        loop {
            let outcome = self.take(call).await;
            if place.is_some() && !died && !armed.exists() {
                assert_eq!(
                    self.machine.wait_for_driver().await,
                    None,
                    "{call:?}: the driver was to be killed"
                );
                self.machine.start_driver(None).await;
                died = true;
            }
            match outcome {
                Ok(()) => break,
                Err(status) => assert!(Instant::now() < deadline, "{call:?}, {place:?}: {status}"),
            }
            tokio::time::sleep(PACE).await;
        }
        assert!(place.is_none() || died, "{call:?}: {place:?} was not passed again");
    }

    /// Fails unless everything is there once that should be, after this call of a life.
    fn check(&self, call: Call, place: Option<&Place>) {
        let (after, is_filesystem) =
            (|first: Call, last: Call| first <= call && call < last, self.fs_type.is_some());
        let [one, two] = ["one", "two"].map(|pod| self.machine.target(&self.disk, pod));
        let is_staged = is_filesystem && (after(Stage, Unstage) || after(StageAgain, UnstageAgain));
        for (path, is_there) in [
            (self.machine.staging(&self.disk), is_staged),
            (one.clone(), after(Publish, Unpublish)),
            (two.clone(), after(PublishReadOnly, UnpublishReadOnly)),
        ] {
            let mounts = self.machine.mounts_at(&path);
            assert_eq!(
                mounts.len(),
                usize::from(is_there),
                "{call:?}, {place:?}: {}: {mounts:?}",
                path.display()
            );
        }
        assert_eq!(one.exists(), after(Publish, Unpublish), "{call:?}, {place:?}");
        assert_eq!(two.exists(), after(PublishReadOnly, UnpublishReadOnly), "{call:?}, {place:?}");
        let kept = |path: &Path| if is_filesystem { path.join("kept") } else { path.to_owned() };
        if call == Publish {
            let mut file =
                std::fs::File::options().create(is_filesystem).write(true).open(kept(&one)).unwrap();
            file.write_all(&KEPT).unwrap();
            file.sync_all().unwrap();
        }
        let shown = match call {
            PublishReadOnly | Expand => kept(&two),
            StageAgain if is_filesystem => kept(&self.machine.staging(&self.disk)),
            UnstageAgain if !is_filesystem => self.disk.image.clone(),
            _ => return,
        };
        let mut found = [0; KEPT.len()];
        std::fs::File::open(shown).unwrap().read_exact(&mut found).unwrap();
        assert!(found == KEPT, "{call:?}, {place:?}: what was written is not there");
        if call == PublishReadOnly && is_filesystem {
            assert!(std::fs::write(kept(&two), "x").is_err(), "{place:?}: a read-only target was written to");
        }
    }
}
