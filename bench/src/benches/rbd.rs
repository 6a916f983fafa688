//! Bench: volumes that are images in Ceph, from a guest claim until it is bound, and from a VolumeAttachment of the guest
//! until it is attached to a virtual machine and until it is detached again. The floor is the same with files, in the same
//! lab.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use infra_api::EngineKind;
use tests::pods::{self, PodScenario};
use tests::{Scenario, eventually};

use crate::objects::{Attachments, Claim, Claims};
use crate::report::Report;
use crate::work::{Work, case};

/// Runs the bench.
pub async fn run(report: &Report, work: &Work) -> Result<()> {
    let (report, work) = (report.clone(), work.clone());
    pods::run_alone(move |pods| async move { measure(&pods, &report, &work).await }).await
}

async fn measure(pods: &Arc<PodScenario>, report: &Report, work: &Work) -> Result<()> {
    let s = pods.scenario();
    let images = pool_of_images(s).await?;
    let files = s.pool(&[]).await?;
    s.show_to_libvirt(&files).await?;
    let pool = |name: String| Pool::new(pods, name);
    let pools = [pool(images).await?, pool(files.name.to_string()).await?];
    for _ in 0..work.warm_up() {
        both(&pools, 1).await?;
    }
    let bursts = work.bursts(&[10]).into_iter().map(|burst| (case(burst), burst, work.rounds()));
    for (name, at_once, rounds) in [("one".to_owned(), 1, work.count())].into_iter().chain(bursts) {
        let mut all = [Times::default(), Times::default()];
        for _ in 0..rounds {
            for (all, one) in all.iter_mut().zip(both(&pools, at_once).await?) {
                all.add(one);
            }
        }
        let [images, files] = &all;
        report.times_of(&name, "create", &images.create, &files.create);
        report.times_of(&name, "attach", &images.attach, &files.attach);
        report.times_of(&name, "detach", &images.detach, &files.detach);
    }
    eventually("the pool of files is empty", tests::PATIENCE, || async {
        let mut left = s.infra.list_volumes(None, None).await?.items;
        left.retain(|volume| volume.pool == files.name);
        Ok(if left.is_empty() { Ok(()) } else { Err(format!("{} volumes are left", left.len())) })
    })
    .await
}

async fn pool_of_images(s: &Scenario) -> Result<String> {
    let pools = s.infra.list_pools().await?;
    let pool = pools.into_iter().find(|pool| pool.engine == EngineKind::Rbd);
    Ok(pool.context("the lab has no pool of images: `cargo lab up --engine rbd`")?.name.to_string())
}

/// Measures the same in both pools, one after the other, so that other load on the host affects both equally.
async fn both(pools: &[Pool<'_>; 2], at_once: usize) -> Result<[Times; 2]> {
    let [images, files] = pools;
    Ok([images.round(at_once).await?, files.round(at_once).await?])
}

/// The claims and attachments of one pool.
struct Pool<'a> {
    node: &'a str,
    claims: Claims,
    attachments: Attachments,
}

#[derive(Default)]
struct Times {
    create: Vec<Duration>,
    attach: Vec<Duration>,
    detach: Vec<Duration>,
}

impl Times {
    fn add(&mut self, other: Self) {
        self.create.extend(other.create);
        self.attach.extend(other.attach);
        self.detach.extend(other.detach);
    }
}

impl<'a> Pool<'a> {
    async fn new(pods: &'a PodScenario, name: String) -> Result<Self> {
        let s = pods.scenario();
        let (_, class) = s.classes(&[("pool", &name)]).await?;
        let claims = Claims::of_class(&s.guest, &s.name, &s.name, &class);
        let attachments = Attachments::watch(&s.guest, &s.name);
        Ok(Self { node: &pods.first_node, claims, attachments })
    }

    async fn round(&self, at_once: usize) -> Result<Times> {
        let (claims, create) = self.claims.create(at_once).await?;
        let volumes: Vec<String> = claims.iter().map(|claim: &Claim| claim.volume.clone()).collect();
        let (attachments, attach) = self.attachments.attach(&volumes, self.node).await?;
        let detach = self.attachments.detach(&attachments).await?;
        self.claims.delete(&claims).await?;
        Ok(Times { create, attach, detach })
    }
}
