//! Rights of a guest's gc-csi in both clusters, and of `kubectl nestor` with the account of the guest.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use crds::names;
use csi::proto::CreateSnapshotRequest;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tests::driver::{Driver, new_volume};
use tests::guest::static_volume;
use tests::kubectl_plugin::execute;
use tests::program::{Running, binary};
use tests::{MIB, PATIENCE, eventually, run_alone, unique};
use tonic::{Code, Status};

use super::guest::Site;
use super::shim::{delete_lease, leads};
use super::table::{GcCsi, How, steps};

/// How long an outcome may take within one attempt.
const MOMENT: Duration = Duration::from_secs(8);

/// Volumes and snapshots of the guest.
struct Objects {
    /// For calls.
    used: String,
    taken: String,
    doomed: String,
    doomed_snapshot: String,
    /// Bound to a claim of the guest, `data`.
    bound: String,
    stale: String,
    orphan: String,
    /// A claim that no pool can serve.
    pending: String,
}

impl Objects {
    async fn create(site: &Site<'_>) -> Result<Self> {
        let (used, doomed) = (site.volume().await?, site.volume().await?);
        let (taken, doomed_snapshot) = (site.snapshot(&used).await?, site.snapshot(&used).await?);
        let (bound, stale, orphan) = (site.volume().await?, site.volume().await?, site.volume().await?);
        site.s.static_claim("data", &bound, json!({})).await?;
        let class = site.s.management_class(&[(&format!("pool.{}", unique("label")), "none")]).await?;
        let pending = unique("pending");
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": pending, "labels": {names::LABEL_CLUSTER_ID: site.token.tenant.cluster_id}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": {"requests": {"storage": "4Mi"}},
            },
        }))?;
        site.namespace.claims().create(&PostParams::default(), &claim).await?;
        Ok(Self { used, taken, doomed, doomed_snapshot, bound, stale, orphan, pending })
    }
}

/// A gc-csi that runs, with the objects of its steps.
struct Steps<'a> {
    site: &'a Site<'a>,
    program: &'a Running,
    driver: Driver,
    objects: Objects,
}

type Outcome = Result<(), String>;

impl Steps<'_> {
    async fn run(&self, step: GcCsi) -> Result<()> {
        self.prepare(step).await?;
        let withheld = self.site.withheld(step).await?;
        let subject = self.begin(step).await?;
        withheld.until_refused(|| self.program.log(), || self.attempt(step, &subject)).await?;
        self.tidy(step, &subject).await
    }

    /// What a step needs before its rights are missing.
    async fn prepare(&self, step: GcCsi) -> Result<()> {
        match step {
            GcCsi::Trace => {
                self.driver.publish(&self.objects.used, &self.site.vm.name).await?;
            }
            GcCsi::RequestedDisk => {
                self.driver.publish(&self.objects.bound, &self.site.vm.name).await?;
            }
            // It would report other conditions of the same claim, because the volume is not in its namespace.
            GcCsi::Attach => self.site.s.stop_component("g1-gc-csi").await?,
            GcCsi::Orphan => self.bind_and_release(&self.objects.orphan).await?,
            _ => {}
        }
        Ok(())
    }

    /// What needs the rights; returns the name of an object that it creates.
    async fn begin(&self, step: GcCsi) -> Result<String> {
        let (site, s) = (self.site, self.site.s);
        Ok(match step {
            GcCsi::LoseLease => delete_lease(&s.guest, &s.name, "gc-csi-controller").await.map(drop_text)?,
            GcCsi::OwnerReferences => site.namespace.cluster(&site.token.tenant.name, &[]).await?.name_any(),
            GcCsi::NewNode => s.lab.join_guest(&site.member).await.map(drop_text)?,
            GcCsi::RequestedDisk => {
                let volume = s.bound("data").await?.1.name_any();
                s.k8s_attachments().attach_by("nobody.example", &volume, &site.vm.name).await?
            }
            GcCsi::StaleEntry => self.driver.publish(&self.objects.stale, &site.member.name).await?,
            GcCsi::RenewToken => {
                site.token.make_due(s).await?;
                site.token.renewed(s).await?
            }
            GcCsi::Start
            | GcCsi::Renew
            | GcCsi::Calls
            | GcCsi::AbandonedSnapshot
            | GcCsi::Attach
            | GcCsi::Orphan
            | GcCsi::Trace => String::new(),
        })
    }

    async fn attempt(&self, step: GcCsi, subject: &str) -> Result<Outcome> {
        let site = self.site;
        match step {
            GcCsi::Start => bail!("it has started"),
            GcCsi::Renew | GcCsi::LoseLease => leads(self.program, "nestor_gc_csi").await,
            GcCsi::Calls => Ok(self.calls().await),
            GcCsi::OwnerReferences => {
                let owners =
                    site.namespace.snapshots().get(&self.objects.taken).await?.metadata.owner_references;
                Ok(owners.map(drop).ok_or_else(|| "no ownerReference".to_owned()))
            }
            GcCsi::AbandonedSnapshot => Ok(self.abandoned_snapshot().await),
            GcCsi::NewNode => {
                let labels = site.nodes().get(&site.member.name).await?.labels().clone();
                let is_there = labels.contains_key(names::LABEL_ZONE);
                Ok(if is_there { Ok(()) } else { Err(format!("{labels:?}")) })
            }
            GcCsi::Attach => self.attach_and_detach().await,
            GcCsi::RequestedDisk => {
                let refused = self.driver.unpublish(&self.objects.bound, &site.vm.name).await.err();
                let refused = refused.context("a disk that is requested was detached")?;
                let is_right =
                    refused.code() == Code::FailedPrecondition && refused.message().contains(subject);
                Ok(if is_right { Ok(()) } else { Err(refused.message().to_owned()) })
            }
            GcCsi::StaleEntry => {
                let entries = site.namespace.vms().get(&site.member.name).await?.spec.volumes;
                Ok(if entries.is_empty() { Ok(()) } else { Err(format!("{entries:?}")) })
            }
            GcCsi::Orphan => self.orphan_comes_and_goes().await,
            GcCsi::RenewToken => {
                let is_stored = site.token.stored(site.s).await? == subject;
                Ok(if is_stored { Ok(()) } else { Err("the earlier token is stored".to_owned()) })
            }
            GcCsi::Trace => self.traces().await,
        }
    }

    /// Undoes what would disturb the next steps.
    async fn tidy(&self, step: GcCsi, subject: &str) -> Result<()> {
        let vm = &self.site.vm.name;
        match step {
            GcCsi::Calls | GcCsi::Trace => self.driver.unpublish(&self.objects.used, vm).await?,
            GcCsi::RequestedDisk => {
                self.site.s.guest_attachments().delete(subject, &DeleteParams::default()).await?;
                eventually("the disk is detached", PATIENCE, || async {
                    Ok(self.driver.unpublish(&self.objects.bound, vm).await.map_err(|one| one.to_string()))
                })
                .await?;
                self.site.s.start_component("g1-gc-csi").await?;
            }
            _ => {}
        }
        Ok(())
    }

    // ---- calls ----

    /// Each kind of call; their refusals are independent.
    async fn calls(&self) -> Outcome {
        let (driver, objects, vm) = (&self.driver, &self.objects, &self.site.vm.name);
        let created = || async { driver.create(new_volume("created", 4 * MIB, "nestor")).await.map(drop) };
        let missing_vm = || async {
            match driver.publish(&objects.used, "absent").await {
                Err(status) if status.code() == Code::NotFound => Ok(()),
                Err(status) => Err(status),
                Ok(_) => Err(Status::internal("a disk was attached to a VM that does not exist")),
            }
        };
        let outcomes = futures::join!(
            created(),
            driver.expand(&objects.used, 8 * MIB),
            driver.publish(&objects.used, vm),
            driver.snapshot("created", &objects.used, "nestor"),
            driver.delete_snapshot(&objects.doomed_snapshot),
            driver.delete(&objects.doomed),
            driver.delete("absent"),
            driver.delete_snapshot("absent"),
            missing_vm(),
        );
        let (created, expanded, published, taken, snapshot, deleted, no_volume, no_snapshot, no_vm) =
            outcomes;
        let outcomes = [created, expanded.map(drop), published.map(drop), taken.map(drop), snapshot, deleted];
        let failed = outcomes.into_iter().chain([no_volume, no_snapshot, no_vm]).filter_map(Result::err);
        let failed: Vec<String> =
            failed.map(|status| format!("{:?}: {}", status.code(), status.message())).collect();
        if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
    }

    /// A snapshot for a content that does not exist is refused, so that nothing is left.
    async fn abandoned_snapshot(&self) -> Outcome {
        let parameters = [
            (names::PARAMETER_MANAGEMENT_SNAPSHOT_CLASS.to_owned(), "nestor".to_owned()),
            ("csi.storage.k8s.io/volumesnapshotcontent/name".to_owned(), "absent".to_owned()),
        ];
        let request = CreateSnapshotRequest {
            name: unique("abandoned"),
            source_volume_id: self.objects.used.clone(),
            parameters: parameters.into(),
            ..Default::default()
        };
        match self.driver.calls().create_snapshot(request).await {
            Err(status) if status.code() == Code::NotFound => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }

    // ---- the guest's claims ----

    /// The guest's claim and its events show each attach.
    async fn attach_and_detach(&self) -> Result<Outcome> {
        let (handle, vm) = (&self.objects.bound, &self.site.vm.name);
        self.driver.publish(handle, vm).await?;
        let shown = self.shows_attached("True").await;
        self.driver.unpublish(handle, vm).await?;
        if let Err(why) = shown.and(self.shows_attached("False").await) {
            return Ok(Err(why));
        }
        let events = self.site.s.events("data").await?;
        let is_reported = events.iter().any(|(_, text)| text.contains(vm.as_str()));
        Ok(if is_reported { Ok(()) } else { Err(format!("{events:?}")) })
    }

    async fn shows_attached(&self, status: &str) -> Outcome {
        let what = format!("the condition Attached is {status}");
        let shown = eventually(&what, MOMENT, || async {
            let claim = self.site.s.guest_claims().get("data").await?;
            let conditions = claim.status.and_then(|status| status.conditions).unwrap_or_default();
            let is_it =
                conditions.iter().any(|one| one.type_ == "nestor.dev/Attached" && one.status == status);
            Ok(if is_it { Ok(()) } else { Err(format!("{conditions:?}")) })
        });
        shown.await.map_err(|error| error.to_string())
    }

    // ---- orphans ----

    /// Binds a claim of the guest to a management claim, and deletes it with its volume.
    async fn bind_and_release(&self, handle: &str) -> Result<()> {
        let s = self.site.s;
        let policy = json!({"persistentVolumeReclaimPolicy": "Delete"});
        let volume = s.static_claim("released", handle, policy).await?.name_any();
        self.has_annotation(handle, names::ANNOTATION_GUEST_PV, true, PATIENCE).await.map_err(text)?;
        s.guest_claims().delete("released", &DeleteParams::default()).await?;
        self.delete_volume(&volume).await
    }

    async fn delete_volume(&self, volume: &str) -> Result<()> {
        let volumes = self.site.s.guest_volumes();
        // With policy Delete, the lab's driver may have deleted it already, because it does not own the claim.
        match volumes.delete(volume, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => drop(deleted?),
        }
        eventually(&format!("guest volume {volume} deleted"), PATIENCE, || async {
            let left = volumes.get_opt(volume).await?;
            Ok(left.map_or(Ok(()), |volume| Err(format!("{:?}", volume.metadata.finalizers))))
        })
        .await
    }

    async fn has_annotation(&self, claim: &str, key: &str, expected: bool, within: Duration) -> Outcome {
        let what = format!("{key} on {claim}: {expected}");
        let shown = eventually(&what, within, || async {
            let annotations = self.site.namespace.claims().get(claim).await?.annotations().clone();
            let matches = annotations.contains_key(key) == expected;
            Ok(if matches { Ok(()) } else { Err(format!("{annotations:?}")) })
        });
        shown.await.map_err(|error| error.to_string())
    }

    /// The management claim is an orphan, has a volume for a while, and is an orphan again; the same event reports both.
    async fn orphan_comes_and_goes(&self) -> Result<Outcome> {
        let (s, handle) = (self.site.s, self.objects.orphan.as_str());
        let is_orphan =
            |expected| self.has_annotation(handle, names::ANNOTATION_ORPHANED_SINCE, expected, MOMENT);
        if let Err(why) = is_orphan(true).await {
            return Ok(Err(why));
        }
        let policy = json!({"persistentVolumeReclaimPolicy": "Delete"});
        let volume = static_volume(&unique(&s.name), &s.name, handle, &policy)?;
        let volume = s.guest_volumes().create(&PostParams::default(), &volume).await?.name_any();
        let is_named = is_orphan(false).await;
        self.delete_volume(&volume).await?;
        Ok(is_named.and(is_orphan(true).await))
    }

    // ---- the plugin ----

    /// Traces of an attached and of a pending claim, without refusals of what the account of a guest may read.
    async fn traces(&self) -> Result<Outcome> {
        let kubeconfig = self.site.token.kubeconfig().display().to_string();
        let cluster = ["--management-kubeconfig", &*kubeconfig, "--management-namespace"];
        let mut said = String::new();
        for claim in [&self.objects.used, &self.objects.pending] {
            let subject = format!("pvc/{claim}");
            let words = [&["trace", &*subject][..], &cluster, &[&*self.site.namespace.name]].concat();
            let answer = execute(&binary(&self.site.s.lab, "kubectl-nestor"), &words).await?;
            said.push_str(&answer.out);
            said.push_str(&answer.err);
        }
        let refused = ["volumeattachments", "storageclasses"].map(|one| format!("resource \"{one}\""));
        let is_refused = refused.iter().any(|text| said.contains(text));
        Ok(if is_refused { Err(said) } else { Ok(()) })
    }
}

fn text(why: String) -> anyhow::Error {
    anyhow::Error::msg(why)
}

fn drop_text((): ()) -> String {
    String::new()
}

async fn each_step(site: &Site<'_>) -> Result<()> {
    let withheld = site.withheld(GcCsi::Start).await?;
    let program = site.spawn().await?;
    withheld.until_refused(|| program.log(), || leads(&program, "nestor_gc_csi")).await?;
    program.ready().await?;
    let objects = Objects::create(site).await?;
    let own = Steps { site, program: &program, driver: site.driver()?, objects };
    let later = steps(|how| if let How::GcCsi(step) = how { Some(step) } else { None });
    let mut failed = Vec::new();
    for step in later.into_iter().filter(|step| *step != GcCsi::Start) {
        failed.extend(own.run(step).await.err().map(|error| format!("{step:?}: {error:#}")));
    }
    program.stop().await?;
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

#[tokio::test]
async fn each_right_of_gc_csi_is_needed() -> Result<()> {
    run_alone(|s| async move {
        let site = Site::create(&s).await?;
        let outcome = each_step(&site).await;
        site.remove().await?;
        outcome
    })
    .await
}
