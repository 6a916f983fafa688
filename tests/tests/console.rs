//! Console: what it shows of a volume, its events as they happen, and that it only reads.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use lab::cache::packages;
use lab::ui::Ui;
use serde_json::{Value, json};
use tests::browser::Browser;
use tests::console::{Console, warn};
use tests::own_namespace::OwnNamespace;
use tests::program::management_cluster;
use tests::{Scenario, run, unique};

const HOSTILE: &str = "</script><img src=x onerror=alert(1)><b>bold";

#[tokio::test]
async fn a_volume_is_shown_from_its_claim_to_its_disk() -> Result<()> {
    run(|s| async move {
        let console = Console::start(&s).await?;
        let (node, handle) = (s.node().await?, s.bound_claim("data").await?);
        let query = format!("?q={handle}");
        let page = console.shows(&query, |page| page.contains(&format!("<code>{handle}</code>"))).await?;
        ensure!(page.contains(&format!("{}/data", s.name)) && page.contains("Bound"), "{page}");
        ensure!(page.contains("No disks."), "{page}");

        s.driver.publish(&handle, &node.name).await?;
        let stages = r#"<span class="state ok">attached</span>"#;
        let page = console.shows(&query, |page| page.matches(stages).count() == 2).await?;
        ensure!(page.contains(r#"<span class="state ok">requested</span>"#), "{page}");
        ensure!(page.contains(&node.name), "{page}");

        s.driver.unpublish(&handle, &node.name).await?;
        console.shows(&query, |page| page.contains("No disks.")).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_attach_that_fails_has_its_cause_and_the_next_step() -> Result<()> {
    run(|s| async move {
        let console = Console::start(&s).await?;
        let (one, two, handle) = (s.node().await?, s.node().await?, s.bound_claim("data").await?);
        s.driver.publish(&handle, &one.name).await?;
        let entry = json!({"name": handle, "persistentVolumeClaim": {"claimName": handle}});
        s.add_entry(&two.name, entry).await?;
        let query = format!("?q={}&show=open", two.name);
        let page = console.shows(&query, |page| page.contains("attach failed")).await?;
        ensure!(page.contains("VolumeInUse") && page.contains("other VM"), "{page}");
        s.remove_entries(&two.name, |entry| entry["name"] == *handle).await?;
        s.driver.unpublish(&handle, &one.name).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn events_arrive_as_they_happen_and_after_a_reconnect() -> Result<()> {
    run(|s| async move {
        let console = Console::start(&s).await?;
        let namespace = s.own_namespace().await?;
        let (one, two) = (unique("one"), unique("two"));
        let mut stream = console.events(&format!("?q={}", namespace.name)).await?;
        warn(&s.management, &namespace.name, "a", "TestOfEvents", &one).await?;
        let id = stream.line_with("id:").await?;
        let id = id.trim_start_matches("id:").trim();
        let event = stream.line_with(&one).await?;
        let event: Value = serde_json::from_str(event.trim_start_matches("data:"))?;
        assert_eq!(event["object"], format!("PersistentVolumeClaim {}/a", namespace.name));
        assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("TestOfEvents")));
        drop(stream);

        warn(&s.management, &namespace.name, "a", "TestOfEvents", &two).await?;
        let mut again = console.events(&format!("?after={id}")).await?;
        again.line_with(&two).await?;
        let mut other = console.events("?q=no-such-text&after=0").await?;
        warn(&s.management, &namespace.name, "a", "TestOfEvents", "no-such-text").await?;
        ensure!(other.line_with("data:").await?.contains("no-such-text"));
        console.shows(&format!("?q={one}"), |page| page.contains(&one)).await?;
        Ok(())
    })
    .await
}

/// Creates a claim and an event whose texts are hostile.
async fn hostile_texts(s: &Scenario, namespace: &OwnNamespace) -> Result<()> {
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {
            "name": "hostile", "labels": {"nestor.dev/cluster-id": namespace.name},
            "annotations": {"nestor.dev/guest-pvc": HOSTILE, "nestor.dev/guest-namespace": HOSTILE},
        },
        "spec": {
            "storageClassName": "none", "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }))?;
    namespace.claims().create(&PostParams::default(), &claim).await?;
    warn(&s.management, &namespace.name, "hostile", "Hostile", HOSTILE).await
}

#[tokio::test]
async fn hostile_text_of_a_cluster_is_shown_as_text() -> Result<()> {
    run(|s| async move {
        let console = Console::start(&s).await?;
        let namespace = s.own_namespace().await?;
        hostile_texts(&s, &namespace).await?;
        let escaped = "&lt;img src=x onerror=alert(1)&gt;";
        let query = format!("?q={}", namespace.name);
        // The two annotations and the event.
        let page = console.shows(&query, |page| page.matches(escaped).count() >= 3).await?;
        ensure!(!page.contains("<img") && !page.contains("<b>"), "{page}");
        let page = console.page("?q=%3C%2Fscript%3E%3Cimg+src%3Dx%3E").await?;
        ensure!(!page.contains("<img"), "{page}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn other_methods_and_foreign_host_names_are_refused() -> Result<()> {
    run(|s| async move {
        let console = Console::start(&s).await?;
        for path in ["/", "/events", "/no-such-path"] {
            for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
                let answer = console.request(method, path, "localhost").await?;
                assert_eq!(answer.status, 405, "{method} {path}: {answer:?}");
            }
        }
        let foreign = console.request("GET", "/", "console.attacker.example").await?;
        assert_eq!(foreign.status, 421, "{foreign:?}");
        ensure!(!foreign.body.contains("<html"), "{foreign:?}");
        for (path, status) in
            [("/", 200), ("/console.js", 200), ("/console.css", 200), ("/no-such-path", 404)]
        {
            let answer = console.request("GET", path, "127.0.0.1").await?;
            assert_eq!(answer.status, status, "{path}: {answer:?}");
            for header in ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff"] {
                ensure!(answer.head.contains(header), "{path}: {answer:?}");
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_pools_are_shown_with_the_storage_infra_and_otherwise_why_not() -> Result<()> {
    run(|s| async move {
        let page = Console::start(&s).await?.page("").await?;
        ensure!(page.contains("no connection to the storage infra"), "{page}");
        let console = Console::start_with_infra(&s).await?;
        for pool in s.infra.list_pools().await? {
            let name = format!("<code>{}</code>", pool.name);
            let page = console.shows("", |page| page.contains(&name)).await?;
            ensure!(page.contains("<meter"), "{page}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn its_account_reads_what_the_page_shows_and_nothing_else() -> Result<()> {
    run(|s| async move {
        let kubeconfig = management_cluster(&s)?.kubeconfig_of("nestor-console");
        let client =
            kube_kit::client::connect("management", "--kubeconfig", Some(&kubeconfig), "tests").await?;
        let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
        claims.list(&ListParams::default().limit(1)).await?;
        let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::all(client.clone());
        let error = secrets.list(&ListParams::default()).await.err().context("it lists Secrets")?;
        ensure!(error.to_string().contains("forbidden"), "{error}");
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, &s.namespace);
        let error =
            claims.delete("any", &DeleteParams::default()).await.err().context("it deletes claims")?;
        ensure!(error.to_string().contains("forbidden"), "{error}");
        Ok(())
    })
    .await
}

/// The background of the page for a user who prefers these colours.
async fn background(browser: &Browser, scheme: &str) -> Result<String> {
    browser.appearance(1440, 900, scheme).await?;
    let background = browser.evaluate("getComputedStyle(document.body).backgroundColor").await?;
    browser.picture(&format!("console-{scheme}")).await?;
    Ok(background.to_string())
}

async fn looks_different_in_light_and_dark(browser: &Browser) -> Result<()> {
    let light = background(browser, "light").await?;
    let dark = background(browser, "dark").await?;
    ensure!(light != dark, "{light} in both");
    Ok(())
}

/// The element that has the focus: its name, and whether its outline is visible.
const FOCUSED: &str = "(() => { const e = document.activeElement; \
    return [e.tagName, e.getAttribute('href') ?? e.id ?? '', getComputedStyle(e).outlineStyle !== 'none']; })()";

/// Everything that a mouse can use.
const USABLE: &str = "[...document.querySelectorAll('a, button, input, summary, [tabindex=\"0\"]')].length";

async fn is_usable_by_keyboard(browser: &Browser) -> Result<()> {
    let usable = browser.evaluate(USABLE).await?.as_u64().context("no number")?;
    let mut reached = Vec::new();
    for _ in 0..usable {
        browser.press("Tab", 9).await?;
        let focused = browser.evaluate(FOCUSED).await?;
        ensure!(focused[2] == true, "the focus of {focused} is not visible");
        reached.push(focused);
    }
    assert_eq!(reached[0][1], "#content", "the first element skips to the content");
    let tags: BTreeSet<String> = reached.iter().map(|one| one[0].to_string()).collect();
    for tag in ["\"A\"", "\"BUTTON\"", "\"INPUT\"", "\"DIV\""] {
        ensure!(tags.contains(tag), "{tag} is not reached: {reached:?}");
    }
    ensure!(!tags.contains("\"BODY\""), "the focus was lost before the last element: {reached:?}");
    browser.evaluate("document.querySelector('.skip').focus()").await?;
    browser.press("Enter", 13).await?;
    browser.waits_for("document.activeElement.id === 'content'").await
}

/// Volumes in several states: attached, attached elsewhere although another VM requests it, and too large for every pool.
struct Volumes {
    attached: Vec<String>,
    node: String,
    other: String,
}

impl Volumes {
    async fn create(s: &Scenario) -> Result<Self> {
        let (node, other) = (s.node().await?.name, s.node().await?.name);
        let mut attached = Vec::new();
        for name in ["orders", "search", "uploads"] {
            let handle = s.bound_claim(name).await?;
            s.driver.publish(&handle, &node).await?;
            attached.push(handle);
        }
        let entry = json!({"name": attached[0], "persistentVolumeClaim": {"claimName": attached[0]}});
        s.add_entry(&other, entry).await?;
        s.claim("archive", "nestor", "8Pi").await?;
        Ok(Self { attached, node, other })
    }

    async fn detach(&self, s: &Scenario) -> Result<()> {
        s.remove_entries(&self.other, |entry| entry["name"] == *self.attached[0]).await?;
        for handle in &self.attached {
            s.driver.unpublish(handle, &self.node).await?;
        }
        Ok(())
    }
}

/// An event appears in an open page, as text.
async fn gets_an_event(s: &Scenario, browser: &Browser, claim: &str) -> Result<()> {
    browser.evaluate("window.opened = true").await?;
    let message = format!("{} {HOSTILE}", unique("live"));
    warn(&s.management, &s.namespace, claim, "TestOfEvents", &message).await?;
    let shown = format!(
        "[...document.querySelectorAll('#event-rows td')].some((cell) => cell.textContent === {})",
        json!(message)
    );
    browser.waits_for(&shown).await?;
    browser.waits_for("window.opened && document.querySelector('#event-rows :is(img, b)') === null").await
}

#[tokio::test]
async fn the_page_works_in_a_browser() -> Result<()> {
    run(|s| async move {
        packages::ensure_browser(&Ui::default()).await?;
        let console = Console::start_with_infra(&s).await?;
        let volumes = Volumes::create(&s).await?;
        let is_complete = |page: &str| {
            ["attach failed", "too little free space", "<meter"].iter().all(|text| page.contains(text))
        };
        console.shows("", is_complete).await?;

        let browser = Browser::start().await?;
        browser.open(&console.url()).await?;
        browser.waits_for("document.getElementById('live').textContent.startsWith('Live')").await?;
        looks_different_in_light_and_dark(&browser).await?;
        is_usable_by_keyboard(&browser).await?;
        gets_an_event(&s, &browser, &volumes.attached[0]).await?;
        assert_eq!(browser.problems(), [json!(null); 0]);
        volumes.detach(&s).await
    })
    .await
}
