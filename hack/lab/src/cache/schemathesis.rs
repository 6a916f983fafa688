//! schemathesis, which tests an API by its OpenAPI document. It is installed from PyPI, with all its dependencies in pinned
//! versions whose digests pip verifies. Only one step of `cargo lab test --all` needs it, so it is installed on demand.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Key, entry, packages};
use crate::process::{command, run};
use crate::run::repository;
use crate::ui::Ui;

/// Debian's Python, whatever else is in the PATH.
const PYTHON: &str = "/usr/bin/python3";

/// Returns the Python interpreter that has the module `schemathesis.cli`.
pub(crate) async fn schemathesis(ui: &Ui) -> Result<PathBuf> {
    packages::ensure_python(ui).await?;
    let requirements = repository().join("hack/tools/schemathesis/requirements.txt");
    let version = run(&mut command(PYTHON, ["--version"])).await?;
    let key = Key::new("schemathesis").with("python", version.as_bytes()).with_file(&requirements)?;
    // Only modules are run, so that the entry may be renamed: the programs in it contain its path.
    let folder = entry(&format!("schemathesis-{}", key.hex()), async |out: &Path| {
        let step = ui.step("installing schemathesis with pip");
        run(command(PYTHON, ["-m", "venv"]).arg(out)).await?;
        let pip = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "--no-deps",
        ];
        let mut install = command(&interpreter(out).display().to_string(), pip);
        run(install.args(["--only-binary", ":all:", "--requirement"]).arg(&requirements)).await?;
        step.done();
        Ok(())
    })
    .await?;
    Ok(interpreter(&folder))
}

fn interpreter(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}
