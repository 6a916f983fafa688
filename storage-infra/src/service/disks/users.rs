//! Who else uses the file of a volume that is about to be attached.

use infra_api::{AttachmentId, ObjectKind, Problem, ProblemCode, VolumeId};

use super::{AttachError, AttachmentContext, Disks};
use crate::catalog::Tx;
use crate::engine::image_lock::{self, Holder};
use crate::engine::{Engine, EngineError, Object};
use crate::hypervisor::DiskSource;
use crate::hypervisor::libvirt::LIBVIRT;
use crate::safety::Check;
use crate::service::problems::{Failure, Result};

impl Disks {
    /// Fails if somebody else uses the volume: a program or a device of this host has its file open, or a client has its image
    /// open. QEMU's lock does not exclude them: most take none, and that of an RBD image goes to whoever asks for it.
    pub(super) async fn refuse_other_users(
        &self,
        context: &AttachmentContext,
        source: &DiskSource,
        is_new: bool,
    ) -> Result<(), AttachError> {
        if !Check::OtherUsers.applies() {
            return Ok(());
        }
        match self.other_user(context, source, is_new).await {
            Ok(None) => Ok(()),
            Ok(Some(problem)) if is_new => Err(AttachError::NotAttached(problem.into())),
            Ok(Some(problem)) => Err(AttachError::Unknown(problem.into())),
            Err(failure) if is_new => Err(AttachError::NotAttached(failure)),
            Err(failure) => Err(AttachError::Unknown(failure)),
        }
    }

    async fn other_user(
        &self,
        context: &AttachmentContext,
        source: &DiskSource,
        is_new: bool,
    ) -> Result<Option<Problem>> {
        let id = context.volume.id.clone();
        // A new attachment has nothing open yet.
        let attached = self.hypervisors_of(&id, is_new.then_some(&context.row.id)).await?;
        let is_attached = !attached.is_empty();
        let (object, source) = (Object::Volume(id.clone()), source.clone());
        let users = move |engine: &dyn Engine| match &source {
            DiskSource::Rbd(_) => Ok(engine.files(&object)?.open.into_iter().collect()),
            DiskSource::File(path) => image_lock::users(path, is_attached).map_err(|source| {
                EngineError::Io { what: format!("check who has {} open", path.display()), source }
            }),
        };
        let users: Vec<Holder> =
            self.engines.run::<_, Failure, _>(&context.pool, move |engine| Ok(users(engine)?)).await?;
        let is_vm = |name: &String| self.hypervisors.get(name).is_ok_and(|own| own.kind() == LIBVIRT);
        // What a VM has is locked, or has a client; what a host has is a loop device.
        let is_expected = |user: &Holder| match user {
            Holder::Locked(_) | Holder::Watching(_) => is_attached,
            Holder::Loop(_) | Holder::Open(_) => !attached.iter().all(is_vm),
        };
        let Some(holder) = users.into_iter().find(|user| !is_expected(user)) else { return Ok(None) };
        let end = match &holder {
            Holder::Watching(_) => {
                "end that client first, or block it with `ceph osd blocklist add` if it cannot be ended"
            }
            Holder::Loop(_) => "stop what uses it, and detach it with `losetup --detach`",
            Holder::Locked(_) | Holder::Open(_) => "end that first, if it is not needed",
        };
        let detail = format!("the volume {id} is in use by {holder}, which is no attachment of it; {end}");
        Ok(Some(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Volume, &id)))
    }

    /// The hypervisors of the volume's attachments, without this one.
    async fn hypervisors_of(&self, volume: &VolumeId, without: Option<&AttachmentId>) -> Result<Vec<String>> {
        let (id, without) = (volume.clone(), without.cloned());
        let read = move |tx: &Tx<'_>| -> Result<_> {
            let mut names = Vec::new();
            for row in tx.attachments(None, Some(&id))? {
                if Some(&row.id) != without.as_ref() {
                    names.extend(tx.node(row.node)?.map(|node| node.spec.hypervisor));
                }
            }
            Ok(names)
        };
        self.core.catalog().read(read).await
    }
}
