//! Progress of operations that take long, on a terminal.

use std::convert::Infallible;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use infra_api::{Adoption, Client, ClientError, Volume, VolumeId};

/// Interval between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

/// Adopts a file, and shows the progress.
pub(super) async fn adopt(
    server: &Client,
    id: &VolumeId,
    adoption: &Adoption,
    timeout: Duration,
) -> Result<Volume, ClientError> {
    tokio::select! {
        adopted = server.adopt(id, adoption, timeout) => adopted,
        never = report(server, id) => match never {},
    }
}

/// Reports until it is cancelled.
async fn report(server: &Client, id: &VolumeId) -> Infallible {
    let is_shown = std::io::stderr().is_terminal();
    loop {
        tokio::time::sleep(INTERVAL).await;
        if !is_shown {
            continue;
        }
        if let Ok(Some(Volume { copied_bytes: Some(copied), capacity_bytes, .. })) =
            server.get_volume(id).await
        {
            let percent = u128::from(copied) * 100 / u128::from(capacity_bytes.max(1));
            let _ = write!(std::io::stderr(), "\rvolume {id}: {percent}%\x1b[K\r");
        }
    }
}
