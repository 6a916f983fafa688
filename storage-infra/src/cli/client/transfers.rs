//! Exports and imports: volume streams between the server and files, or the standard streams.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail, ensure};
use clap::Args;
use futures::{Stream, StreamExt};
use infra_api::stream::{Decoder, Frame, Header, Position};
use infra_api::{Client, Import, ResumePoint, VolumeId, VolumeSource, VolumeSpec};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt, AsyncWrite, AsyncWriteExt};

use super::ClientArgs;
use super::volumes::NewVolumeArgs;
use crate::cli::{output, size};

/// Bytes of a file that are read at a time.
const READ: usize = 1 << 20;

/// Export of a volume or snapshot.
#[derive(Debug, Args)]
pub(in crate::cli) struct ExportArgs {
    /// File to create. `-` is the standard output.
    #[arg(long, value_name = "FILE", default_value = "-")]
    to: PathBuf,
    /// Continue an earlier export to the file after what is complete and correct in it, if the source has not changed
    /// since.
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    client: ClientArgs,
}

/// Import of a volume.
#[derive(Debug, Args)]
pub(in crate::cli) struct ImportArgs {
    /// ID of the new volume.
    id: VolumeId,
    /// File of an export. `-` is the standard input.
    #[arg(long, value_name = "FILE", default_value = "-")]
    from: PathBuf,
    /// Continue an unfinished import of the same export.
    #[arg(long)]
    resume: bool,
    /// Size, such as 10Gi. [default: that of the exported volume]
    #[arg(long, value_parser = size::parse)]
    size: Option<u64>,
    #[command(flatten)]
    volume: NewVolumeArgs,
    #[command(flatten)]
    client: ClientArgs,
}

fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// A standard stream.
fn standard(stream: impl AsFd) -> anyhow::Result<File> {
    let stream = stream.as_fd().try_clone_to_owned().context("cannot use the standard stream")?;
    Ok(File::from_std(std::fs::File::from(stream)))
}

/// Reads a volume stream part by part, and verifies it.
struct PartReader {
    input: Pin<Box<dyn AsyncRead + Send>>,
    decoder: Decoder,
    name: String,
    buffer: Vec<u8>,
}

impl PartReader {
    fn new(input: impl AsyncRead + Send + 'static, name: String) -> Self {
        Self { input: Box::pin(input), decoder: Decoder::default(), name, buffer: vec![0; READ] }
    }

    async fn open(path: &Path) -> anyhow::Result<Self> {
        if is_standard(path) {
            return Ok(Self::new(standard(std::io::stdin())?, "the standard input".to_owned()));
        }
        let file = File::open(path).await.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self::new(file, path.display().to_string()))
    }

    /// The next part; `None` after the end.
    async fn next(&mut self) -> anyhow::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decoder.next_frame().with_context(|| self.name.clone())? {
                return Ok(Some(frame));
            }
            let read = self.input.read(&mut self.buffer).await;
            let length = read.with_context(|| format!("cannot read {}", self.name))?;
            if length == 0 {
                self.decoder.finish().with_context(|| self.name.clone())?;
                return Ok(None);
            }
            self.decoder.push(&self.buffer[..length]);
        }
    }

    async fn header(&mut self) -> anyhow::Result<Header> {
        match self.next().await? {
            Some(Frame::Header(header)) => Ok(header),
            _ => bail!("{} does not begin with a header", self.name),
        }
    }

    /// Skips the parts up to a position.
    async fn skip(&mut self, to: Position) -> anyhow::Result<()> {
        while self.decoder.position().offset < to.offset
            && matches!(self.next().await?, Some(Frame::Extent { .. }))
        {}
        ensure!(
            self.decoder.position() == to,
            "{} is not the export that the unfinished import began with: delete the volume to import this one",
            self.name
        );
        Ok(())
    }
}

/// What a file has of an export.
enum Earlier {
    Nothing,
    Partial(Header, Position),
    Complete,
}

/// A file, or the standard output, that an export is written to.
struct Target {
    output: Pin<Box<dyn AsyncWrite + Send>>,
    file: Option<File>,
    earlier: Earlier,
}

impl Target {
    async fn open(args: &ExportArgs) -> anyhow::Result<Self> {
        if is_standard(&args.to) {
            ensure!(!args.resume, "--resume needs --to FILE");
            ensure!(!std::io::stdout().is_terminal(), "the standard output is a terminal: use --to FILE");
            let output = Box::pin(standard(std::io::stdout())?);
            return Ok(Self { output, file: None, earlier: Earlier::Nothing });
        }
        let mut options = File::options();
        options.read(true).write(true);
        let options = if args.resume { options.create(true) } else { options.create_new(true) };
        let to = args.to.display();
        let mut file = options.open(&args.to).await.with_context(|| format!("cannot create {to}"))?;
        let earlier = if args.resume { find_earlier(&mut file, &args.to).await? } else { Earlier::Nothing };
        let output = Box::pin(file.try_clone().await?);
        Ok(Self { output, file: Some(file), earlier })
    }

    /// Makes everything durable.
    async fn finish(mut self) -> anyhow::Result<()> {
        self.output.flush().await?;
        match self.file {
            Some(file) => Ok(file.sync_all().await?),
            None => Ok(()),
        }
    }
}

/// Finds out what a file has of an export, and removes everything after its last valid extent.
async fn find_earlier(file: &mut File, path: &Path) -> anyhow::Result<Earlier> {
    let mut reader = PartReader::new(file.try_clone().await?, path.display().to_string());
    let header = match reader.header().await {
        Ok(header) => header,
        Err(error) => {
            ensure!(
                file.metadata().await?.len() == 0,
                "cannot resume: {error:#}; remove the file to start again"
            );
            return Ok(Earlier::Nothing);
        }
    };
    loop {
        match reader.next().await {
            Ok(Some(Frame::Header(_) | Frame::Extent { .. })) => {}
            Ok(Some(Frame::End { .. })) => {
                let is_exact = file.metadata().await?.len() == reader.decoder.verified();
                ensure!(
                    is_exact,
                    "{} has more bytes after its end; it is no export of this program",
                    path.display()
                );
                return Ok(Earlier::Complete);
            }
            Ok(None) => return Ok(Earlier::Complete),
            Err(_) => break,
        }
    }
    let valid = reader.decoder.verified();
    file.set_len(valid).await?;
    file.seek(std::io::SeekFrom::Start(valid)).await?;
    Ok(Earlier::Partial(header, reader.decoder.position()))
}

/// Exports a volume or snapshot.
pub(super) async fn export(source: VolumeSource, args: ExportArgs) -> anyhow::Result<()> {
    let name = match &source {
        VolumeSource::Volume(id) => format!("volume {id}"),
        VolumeSource::Snapshot(id) => format!("snapshot {id}"),
    };
    let server = args.client.connect()?;
    let mut target = Target::open(&args).await?;
    let (resume, decoder) = match target.earlier {
        Earlier::Complete => {
            return output::done(args.client.output, &format!("{} is complete", args.to.display()));
        }
        Earlier::Nothing => (None, Decoder::default()),
        Earlier::Partial(header, after) => {
            (Some(ResumePoint { header: header.checksum(), after }), Decoder::resume(after))
        }
    };
    let received = receive(&server, &source, resume, decoder, &mut target).await;
    if !is_standard(&args.to) {
        received.with_context(|| {
            format!("the export to {} is not complete; continue it with --resume", args.to.display())
        })?;
        target.finish().await?;
        return output::done(args.client.output, &format!("{name} exported to {}", args.to.display()));
    }
    received?;
    target.finish().await
}

async fn receive(
    server: &Client,
    source: &VolumeSource,
    resume: Option<ResumePoint>,
    mut decoder: Decoder,
    target: &mut Target,
) -> anyhow::Result<()> {
    let mut stream = server.export(source, resume).await?;
    while let Some(chunk) = stream.next().await {
        decoder.push(&chunk?);
        while let Some(frame) = decoder.next_frame()? {
            let part = match frame {
                Frame::Extent { part, .. } | Frame::End { part } => part,
                Frame::Header(_) if resume.is_some() => continue,
                Frame::Header(header) => [&header.to_bytes(), header.checksum().as_bytes()].concat(),
            };
            target.output.write_all(&part).await.context("cannot write the export")?;
        }
    }
    Ok(decoder.finish()?)
}

/// Imports a volume.
pub(super) async fn import(args: ImportArgs) -> anyhow::Result<()> {
    let ImportArgs { id, from, resume, size, volume, client } = args;
    let mut reader = PartReader::open(&from).await?;
    let header = reader.header().await?;
    let bytes = size.unwrap_or(header.size);
    ensure!(
        bytes >= header.size,
        "--size is smaller than the exported volume, which has {} bytes",
        header.size
    );
    let server = client.connect()?;
    let begun = begin(&server, &id, volume.spec(bytes), resume).await?;
    if !begun.complete {
        let position = begun.position();
        if let Some(position) = position {
            reader.skip(position).await?;
        }
        send(&server, &id, position.is_some(), header, reader).await?;
    }
    let imported = server.get_volume(&id).await?;
    output::one(client.output, &imported.with_context(|| format!("volume {id} not found"))?)
}

/// Begins an import, or finds the one to resume.
async fn begin(server: &Client, id: &VolumeId, spec: VolumeSpec, resume: bool) -> anyhow::Result<Import> {
    match server.get_import(id).await? {
        Some(found) if resume => Ok(found),
        Some(found) if !found.complete && found.position().is_some() => {
            bail!("the volume {id} has an unfinished import: continue it with --resume, or delete the volume")
        }
        _ => {
            let begun = server.put_import(id, &spec).await?;
            ensure!(!begun.complete, "the volume {id} was imported before; delete it to import it again");
            Ok(begun)
        }
    }
}

/// Sends the rest of an export.
async fn send(
    server: &Client,
    id: &VolumeId,
    resume: bool,
    header: Header,
    reader: PartReader,
) -> anyhow::Result<()> {
    let failed = Arc::new(Mutex::new(None));
    let first = [&header.to_bytes(), header.checksum().as_bytes()].concat();
    let parts = futures::stream::iter([Ok(first)]).chain(rest(reader, failed.clone()));
    let sent = server.send_import(id, resume, parts).await;
    // A fault of the file is the cause of what the server says.
    let fault = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (fault, sent) {
        (Some(fault), _) => Err(fault),
        (None, sent) => sent.map(drop).with_context(|| {
            format!(
                "the import of volume {id} is not complete; continue it with --resume, or delete the volume"
            )
        }),
    }
}

/// The remaining parts of an export. A fault is kept for the caller.
fn rest(
    reader: PartReader,
    failed: Arc<Mutex<Option<anyhow::Error>>>,
) -> impl Stream<Item = std::io::Result<Vec<u8>>> + Send + 'static {
    futures::stream::unfold((reader, failed), |(mut reader, failed)| async move {
        match reader.next().await {
            Ok(Some(Frame::Extent { part, .. } | Frame::End { part })) => Some((Ok(part), (reader, failed))),
            Ok(Some(Frame::Header(_)) | None) => None,
            Err(fault) => {
                let error = std::io::Error::other(format!("{fault:#}"));
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
                Some((Err(error), (reader, failed)))
            }
        }
    })
}
