//! What clients ask for. Each request is repeated until it is answered for good.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use infra_api::{
    Access, Account, AttachmentId, AttachmentSpec, Labels, MoveSpec, PoolName, ProblemCode, SnapshotId,
    SnapshotSpec, VolumeId, VolumeSize, VolumeSource, VolumeSpec, VolumeState,
};
use uuid::Uuid;

use super::world::SLOT;
use crate::scope::Scope;
use crate::service::{Failure, Progress, Service};

/// Time that a client waits for an answer.
const WAIT: Duration = Duration::from_millis(500);

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Create(VolumeId, Box<VolumeSpec>),
    Delete(VolumeId),
    Expand(VolumeId, u64),
    Attach(AttachmentId, AttachmentSpec),
    Detach(AttachmentId),
    Fence(AttachmentId),
    Snapshot(SnapshotId, VolumeId),
    DeleteSnapshot(SnapshotId),
    Move(VolumeId, PoolName),
    CancelMove(VolumeId),
}

/// Answer of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// It is done.
    Done,
    /// It is refused for good.
    Refused(String),
    /// It must be repeated.
    Again(String),
    /// It must be repeated once others have ended.
    Blocked(String),
}

impl Answer {
    fn of(failure: &Failure, waits_for_others: bool) -> Self {
        let text = failure.to_string();
        match failure.code() {
            ProblemCode::InUse if waits_for_others => Self::Blocked(text),
            ProblemCode::Unavailable | ProblemCode::NotActive => Self::Again(text),
            code if code.may_have_taken_effect() => Self::Again(text),
            _ => Self::Refused(text),
        }
    }
}

fn progress(found: crate::service::Result<Progress>, attaches: bool) -> Answer {
    match found {
        Ok(Progress::Attached(_)) if attaches => Answer::Done,
        Ok(Progress::Gone) if !attaches => Answer::Done,
        Ok(Progress::Attached(one) | Progress::InProgress(one)) => {
            Answer::Again(format!("{} {:?}", one.state, one.message))
        }
        Ok(Progress::Gone) => Answer::Again("gone".to_owned()),
        Err(failure) if !attaches && failure.code() == ProblemCode::NotFound => Answer::Done,
        Err(failure) => Answer::of(&failure, !attaches),
    }
}

impl Request {
    /// Sends the request.
    pub(super) async fn send(self, service: Service) -> Answer {
        let answer = |done: crate::service::Result<()>, waits| match done {
            Ok(()) => Answer::Done,
            Err(failure) => Answer::of(&failure, waits),
        };
        match self {
            Self::Create(id, spec) => match service.volumes().put(id, *spec, WAIT).await {
                Ok((volume, _)) if volume.state == VolumeState::Creating => {
                    Answer::Again("creating".to_owned())
                }
                Ok(_) => Answer::Done,
                Err(failure) => Answer::of(&failure, false),
            },
            Self::Delete(id) => answer(service.volumes().delete(id).await.map(drop), true),
            Self::Expand(id, slots) => {
                let size = VolumeSize { capacity_bytes: slots * SLOT, limit_bytes: None };
                answer(service.volume_changes().expand(id, size).await.map(drop), false)
            }
            Self::Attach(id, spec) => {
                progress(service.attachments().attach(id, spec, None, WAIT).await, true)
            }
            Self::Detach(id) => progress(service.attachments().detach(id, WAIT).await, false),
            Self::Fence(id) => progress(service.fencing().fence(id, WAIT).await, false),
            Self::Snapshot(id, volume) => {
                let spec = SnapshotSpec { volume, account: Account::default(), labels: Labels::new() };
                match service.snapshots().put(&Scope::All, id, spec, WAIT).await {
                    Ok((snapshot, _)) if snapshot.state == VolumeState::Creating => {
                        Answer::Again("creating".to_owned())
                    }
                    Ok(_) => Answer::Done,
                    Err(failure) => Answer::of(&failure, false),
                }
            }
            Self::DeleteSnapshot(id) => {
                answer(service.snapshots().delete(&Scope::All, id).await.map(drop), true)
            }
            Self::Move(id, pool) => {
                answer(service.moves().begin(id, MoveSpec { pool, bytes_per_second: None }).await, false)
            }
            Self::CancelMove(id) => answer(service.moves().cancel(id).await, false),
        }
    }

    /// What the request is about: later requests about the same thing replace it.
    fn about(&self) -> String {
        match self {
            Self::Create(id, _) | Self::Delete(id) => format!("volume {id}"),
            Self::Expand(id, _) => format!("size of volume {id}"),
            Self::Attach(id, _) | Self::Detach(id) | Self::Fence(id) => format!("attachment {id}"),
            Self::Snapshot(id, _) | Self::DeleteSnapshot(id) => format!("snapshot {id}"),
            Self::Move(id, _) | Self::CancelMove(id) => format!("place of volume {id}"),
        }
    }
}

/// A request with its answer, if there is one.
#[derive(Debug, Clone)]
struct Wanted {
    number: u64,
    request: Request,
    answer: Option<Answer>,
}

type Table = Arc<Mutex<BTreeMap<String, Wanted>>>;

/// What clients want.
#[derive(Default)]
pub(super) struct Clients {
    wanted: Table,
    /// All requests so far, for those that arrive again.
    pub(super) sent: Vec<Request>,
    next: u64,
    pub(super) volumes: Vec<VolumeId>,
    pub(super) snapshots: Vec<SnapshotId>,
    pub(super) attachments: Vec<AttachmentId>,
}

/// Notes an answer, unless another request about the same thing was sent meanwhile.
fn note(table: &Table, number: u64, about: &str, answer: Answer) {
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(wanted) = table.get_mut(about).filter(|wanted| wanted.number == number) {
        wanted.answer = Some(answer);
    }
}

impl Clients {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn table(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Wanted>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wants something: it is asked for now, and until it is answered for good. Runs in the server's runtime.
    pub(super) fn want(&mut self, request: Request, service: &Service) {
        let number = self.number();
        self.sent.push(request.clone());
        let about = request.about();
        let wanted = Wanted { number, request: request.clone(), answer: None };
        self.table().insert(about.clone(), wanted);
        self.send(number, about, request, service);
    }

    fn send(&self, number: u64, about: String, request: Request, service: &Service) {
        let (table, service) = (self.wanted.clone(), service.clone());
        tokio::spawn(async move {
            let answer = request.send(service).await;
            note(&table, number, &about, answer);
        });
    }

    /// Sends everything again that is not answered for good. Returns what must end now, with the last answer: what is blocked only
    /// if all has ended.
    pub(super) fn again(&self, service: &Service, is_last: bool) -> Vec<String> {
        let open: Vec<(String, Wanted)> = {
            let table = self.table();
            let is_open =
                |wanted: &&Wanted| !matches!(wanted.answer, Some(Answer::Done | Answer::Refused(_)));
            let open = table.iter().filter(|(_, wanted)| is_open(wanted));
            open.map(|(about, wanted)| (about.clone(), wanted.clone())).collect()
        };
        let counts = |wanted: &Wanted| is_last || !matches!(wanted.answer, Some(Answer::Blocked(_)));
        let counted = open.iter().filter(|(_, wanted)| counts(wanted));
        let shown = counted.map(|(_, wanted)| format!("{:?}: {:?}", wanted.request, wanted.answer)).collect();
        for (about, Wanted { number, request, .. }) in open {
            self.send(number, about, request, service);
        }
        shown
    }

    /// A new volume.
    pub(super) fn new_volume(&mut self, slots: u64, pool: PoolName, source: Option<VolumeSource>) -> Request {
        let number = self.number();
        let id = VolumeId::new(format!("v{number}")).expect("an ID");
        self.volumes.push(id.clone());
        let mut spec = VolumeSpec::of_size(slots * SLOT);
        if source.is_none() {
            spec.placement.pool = Some(pool);
        }
        spec.source = source;
        Request::Create(id, Box::new(spec))
    }

    pub(super) fn new_snapshot(&mut self, volume: VolumeId) -> Request {
        let number = self.number();
        let id = SnapshotId::new(format!("s{number}")).expect("an ID");
        self.snapshots.push(id.clone());
        Request::Snapshot(id, volume)
    }

    pub(super) fn new_attachment(&mut self, volume: VolumeId, node: Uuid, read_only: bool) -> Request {
        let number = self.number();
        let id = AttachmentId::new(format!("a{number}")).expect("an ID");
        self.attachments.push(id.clone());
        let access = if read_only { Access::MultiNodeReadOnly } else { Access::SingleNode };
        Request::Attach(id, AttachmentSpec { volume, node, read_only, access })
    }

    /// Volumes that were created and whose deletion nobody asked for.
    pub(super) fn expected_volumes(&self) -> Vec<VolumeId> {
        let is_there = |wanted: &Wanted| wanted.answer == Some(Answer::Done);
        let created = |wanted: &Wanted| match &wanted.request {
            Request::Create(id, _) if is_there(wanted) => Some(id.clone()),
            _ => None,
        };
        self.table().values().filter_map(created).collect()
    }

    /// Attachments that were answered for good: whether the disk is attached.
    pub(super) fn attached(&self) -> Vec<(AttachmentId, bool)> {
        let state = |wanted: &Wanted| match (&wanted.request, &wanted.answer) {
            (Request::Attach(id, _), Some(Answer::Done)) => Some((id.clone(), true)),
            (Request::Detach(id) | Request::Fence(id), Some(Answer::Done)) => Some((id.clone(), false)),
            _ => None,
        };
        self.table().values().filter_map(state).collect()
    }

    /// Wants all disks detached.
    pub(super) fn detach_all(&mut self, service: &Service) {
        for id in self.attachments.clone() {
            self.want(Request::Detach(id), service);
        }
    }
}
