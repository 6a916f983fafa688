//! The choice of an operator between the two files of a move, where nothing tells which one the VM used. Neither is removed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use infra_api::{Change, EventKind, MoveChoice, ObjectKind, Problem, ProblemCode, VolumeId};

use super::Moves;
use super::compare::Stamp;
use super::decide::{Step, Wait, decide};
use super::state::State;
use crate::audit;
use crate::catalog::{Side, Tx};
use crate::engine::Engine;
use crate::service::problems::{Failure, Result};

/// The ending of the name that the other file gets. No file of a pool has it.
pub(super) const KEPT: &str = "not-chosen.img";

/// The names that the other file may get, the first that is free.
fn names(dir: &Path, id: &VolumeId) -> impl Iterator<Item = PathBuf> {
    let first = dir.join(format!("{id}.{KEPT}"));
    let more = (2..).map({
        let first = first.clone();
        move |number: u32| first.with_extension(format!("{number}.img"))
    });
    std::iter::once(first).chain(more)
}

impl Moves {
    /// Records which file is the volume's. Fails unless the move waits for that.
    pub async fn choose(self: &Arc<Self>, id: VolumeId, choice: MoveChoice) -> Result<()> {
        let moves = self.clone();
        self.core.run_to_completion(async move { moves.do_choose(&id, choice).await }).await
    }

    async fn do_choose(&self, id: &VolumeId, choice: MoveChoice) -> Result<()> {
        let _lock = self.core.lock_volume(id).await;
        let Some(state) = self.state(id).await? else {
            return Err(refused(id, format!("the volume {id} is not being moved")));
        };
        let side = match choice.pool {
            pool if pool == state.pool.name => Side::Old,
            pool if pool == state.other.name => Side::New,
            pool => {
                let (from, to) = (&state.pool.name, &state.other.name);
                let detail = format!("the pool {pool} has no file of volume {id}; choose {from} or {to}");
                return Err(Failure::new(ProblemCode::Invalid, detail));
            }
        };
        let look = self.look(&state).await?;
        let step = decide(&self.facts(&state, &look).await?);
        let is_chosen = state.moving.chosen == Some(side);
        if step != Step::Wait(Wait::Choice) && !is_chosen {
            return Err(refused(
                id,
                format!("the move of volume {id} does not wait for a choice between its files"),
            ));
        }
        if side == Side::New && state.attached.is_some() && look.found.is_some() {
            let detail =
                format!("a VM has the old file of volume {id} open; power it off or detach the disk first");
            return Err(refused(id, detail));
        }
        let name = id.clone();
        self.core
            .catalog()
            .run(move |tx: &Tx<'_>| -> Result<_> { Ok(tx.set_move_choice(&name, side)?) })
            .await?;
        tracing::warn!(volume = %id, pool = %choice_name(&state, side), who = %audit::actor(), "an operator chose the file of a volume");
        self.core.emit(EventKind::Volume, id, Change::Updated);
        self.core.moves().notify_one();
        Ok(())
    }

    /// Gives the other file a name by which it belongs to no volume. Refused if a VM or process uses it.
    pub(super) async fn set_aside(&self, state: &State) -> Result<()> {
        let id = state.volume.id.clone();
        let object = state.object();
        let cleared = self.files.clear(&state.other, object.clone(), state.volume.disk_uuid).await?;
        let path = self.path(&state.other, &id)?;
        let release = move |engine: &dyn Engine| {
            let dir = path.parent().unwrap_or(Path::new("/"));
            let exists = |path: &PathBuf| !matches!(Stamp::of(path), Ok(None));
            if exists(&path) {
                let free = names(dir, &id).find(|one| !exists(one)).unwrap_or_default();
                let inode = engine.check_release(&object, &free)?;
                engine.release_file(&cleared, &free, inode)?;
                return Ok(Some(free));
            }
            // A crash came after the rename: the last name is that of this file.
            let Some(last) = names(dir, &id).take_while(exists).last() else { return Ok(None) };
            let Some(Stamp { inode, .. }) = Stamp::of(&last)? else { return Ok(None) };
            engine.release_file(&cleared, &last, inode)?;
            Ok(Some(last))
        };
        let kept = self.engines.run::<_, Failure, _>(&state.other, release).await?;
        if let Some(kept) = kept {
            tracing::warn!(volume = %state.volume.id, file = %kept.display(), "the file that was not chosen is kept under another name");
        }
        Ok(())
    }
}

fn choice_name(state: &State, side: Side) -> &infra_api::PoolName {
    match side {
        Side::Old => &state.pool.name,
        Side::New => &state.other.name,
    }
}

fn refused(id: &VolumeId, detail: String) -> Failure {
    Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, id).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_kept_gets_a_name_of_its_own() {
        let id = VolumeId::new("v.1").unwrap();
        let found: Vec<PathBuf> = names(Path::new("/pool"), &id).take(3).collect();
        let expected =
            ["/pool/v.1.not-chosen.img", "/pool/v.1.not-chosen.2.img", "/pool/v.1.not-chosen.3.img"];
        assert_eq!(found, expected.map(PathBuf::from));
        assert!(expected.iter().all(|name| name.contains(crate::engine::file::NOT_CHOSEN)));
    }
}
