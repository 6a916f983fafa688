//! The REST API as a [`StorageInfra`].

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use infra_api::{
    AttachmentId, AttachmentSpec, Capacity, CapacityQuery, Client, ClientError, List, Volume, VolumeId,
    VolumeSpec, VolumeState,
};
use tokio::time::Instant;
use uuid::Uuid;

use super::{AttachError, CreateError, DeleteError, DetachError, ReadError, StorageInfra, Trouble};

/// How often a volume that the infra is still making is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// How long the infra may take to say that it is there.
const PING: Duration = Duration::from_secs(5);

/// Speaks to a storage infra over its REST API.
#[derive(Debug, Clone)]
pub struct Rest(Client);

impl Rest {
    /// With a client that is set up.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// A call that ends by `deadline` in any case.
    async fn by<T, E>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, E>
    where
        E: From<ClientError> + From<Trouble>,
    {
        match tokio::time::timeout_at(deadline, call).await {
            Ok(answer) => answer.map_err(E::from),
            Err(_) => Err(E::from(Trouble::TimedOut(format!(
                "the storage infra at {} did not answer in time; the work may go on there, and the same call finds it",
                self.0.url()
            )))),
        }
    }
}

#[async_trait]
impl StorageInfra for Rest {
    async fn create_volume(
        &self,
        id: &VolumeId,
        spec: &VolumeSpec,
        deadline: Instant,
    ) -> Result<Volume, CreateError> {
        loop {
            let volume: Volume = self.by::<_, CreateError>(deadline, self.0.put_volume(id, spec)).await?;
            let text = match volume.state {
                VolumeState::Ready => return Ok(volume),
                VolumeState::Creating => format!("the storage infra is still creating volume {id}"),
                VolumeState::Deleting => {
                    format!("the storage infra is still deleting an earlier volume {id}")
                }
            };
            if Instant::now() + LOOK_AGAIN >= deadline {
                return Err(Trouble::TimedOut(text).into());
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn delete_volume(&self, id: &VolumeId, deadline: Instant) -> Result<(), DeleteError> {
        self.by(deadline, self.0.delete_volume(id)).await
    }

    async fn get_volume(&self, id: &VolumeId, deadline: Instant) -> Result<Option<Volume>, ReadError> {
        self.by(deadline, self.0.get_volume(id)).await
    }

    async fn list_volumes(
        &self,
        limit: Option<u32>,
        after: Option<&str>,
        deadline: Instant,
    ) -> Result<List<Volume>, ReadError> {
        self.by(deadline, self.0.list_volumes(limit, after)).await
    }

    async fn capacity(&self, query: &CapacityQuery, deadline: Instant) -> Result<Capacity, ReadError> {
        self.by(deadline, self.0.capacity(query)).await
    }

    async fn attach(
        &self,
        id: &AttachmentId,
        spec: &AttachmentSpec,
        wait: Duration,
    ) -> Result<Uuid, AttachError> {
        Ok(self.0.attach(id, spec, wait).await?.disk_uuid)
    }

    async fn detach(&self, id: &AttachmentId, wait: Duration) -> Result<(), DetachError> {
        Ok(self.0.detach(id, wait).await?)
    }

    async fn ping(&self) -> Result<(), Trouble> {
        match self.by::<_, ReadError>(Instant::now() + PING, self.0.health()).await {
            Ok(_) => Ok(()),
            Err(ReadError::Trouble(trouble)) => Err(trouble),
            Err(ReadError::Invalid(text)) => Err(Trouble::Failed(text)),
        }
    }
}
