//! Exports and imports: streams of the content of volumes to and from clients.

mod export;
mod import;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::attachments::UnexpectedDisks;
use super::core::Core;
use super::files::Copies;
use super::pools::Engines;
use super::volumes::Volumes;

pub(super) use export::blocking;

/// How long a client may neither take nor send anything before its stream ends.
const STALLED: Duration = Duration::from_secs(120);

/// The exports and imports.
pub struct Transfers {
    core: Arc<Core>,
    engines: Arc<Engines>,
    volumes: Arc<Volumes>,
    unexpected_disks: Arc<UnexpectedDisks>,
    copies: Arc<Copies>,
    stop: CancellationToken,
}

impl Transfers {
    pub(super) fn new(
        core: Arc<Core>,
        engines: Arc<Engines>,
        volumes: Arc<Volumes>,
        unexpected_disks: Arc<UnexpectedDisks>,
        copies: Arc<Copies>,
    ) -> Self {
        Self { core, engines, volumes, unexpected_disks, copies, stop: CancellationToken::new() }
    }

    /// Ends all exports.
    pub(super) fn end_exports(&self) {
        self.stop.cancel();
    }
}
