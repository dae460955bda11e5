//! Debian roots: folders with a suite's packages, made from the archive that this machine's apt uses.

use std::fs;
use std::path::{Path, PathBuf};

use crate::apt::{self, Need};
use crate::cache::{self, Cache};
use crate::error::{Error, IoContext};
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

/// What making a root needs.
const MMDEBSTRAP: &[Need] = &[Need::Program("mmdebstrap", "mmdebstrap")];

/// Whether apt refuses an archive whose files are out of date.
const CHECK_VALID: &str = "Acquire::Check-Valid-Until";

/// What nobody reads in a root that only programs use.
const LEFT_OUT: &[&str] =
    &["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*"];

/// Downloads packages without installing them, from the same archive and at the same time as the root. Environment:
/// `APIR_DEBS`, an existing folder for them. A metapackage's first dependency of the same name is what it stands for.
const DOWNLOAD: &str = r#"
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$APIR_DEBS"
for package in $APIR_DEB_NAMES; do
    real=$(apt-cache depends "$package" | sed -n 's/^ *Depends: \([a-z0-9.+-]*\).*/\1/p' | grep "^${package%-*}-[0-9]" | head -n 1)
    apt-get download "${real:-$package}"
done
"#;

/// A root to be made.
#[derive(Debug)]
pub struct Suite {
    /// Its name in the archive.
    pub name: &'static str,
    /// What is installed besides the minimum.
    pub packages: &'static [&'static str],
    /// What is only downloaded.
    pub downloads: &'static [&'static str],
    /// Whether the suite changes so often that a copy of the archive may be past its date.
    pub rolling: bool,
}

impl Suite {
    /// What a root of it depends on.
    pub fn key(&self) -> String {
        format!("{} {} {}", self.name, self.packages.join(" "), self.downloads.join(" "))
    }

    /// Makes the root in `to`, whole or not at all; `downloads` shows the folder of the packages that were downloaded.
    pub fn make(
        &self,
        cache: &Cache,
        ui: &Ui,
        to: &Path,
        downloads: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::Check(format!("{}: making a Debian root needs root", to.display())));
        }
        apt::ensure(cache, ui, MMDEBSTRAP)?;
        let log = cache.log(&format!("debian-{}", self.name));
        let mirror = mirror(&log)?;
        let scratch = cache.scratch()?;
        let (root, debs) = (scratch.path().join("root"), scratch.path().join("debs"));
        fs::create_dir(&debs).at("create", &debs)?;
        let bar = ui.bar(&format!("make a root of Debian {}", self.name), Unit::Items, 0);
        let mut tool = Tool::new("mmdebstrap", &log)
            .args(["--variant=minbase", "--aptopt=APT::Install-Recommends \"false\""])
            .arg(format!("--include={}", self.packages.join(",")))
            .args(LEFT_OUT.iter().map(|path| format!("--dpkgopt=path-exclude={path}")))
            .env("APIR_DEBS", &debs)
            .env("APIR_DEB_NAMES", self.downloads.join(" "));
        if let Some(check) = if self.rolling { Some("false".to_owned()) } else { setting(&log, CHECK_VALID)? }
        {
            tool = tool.arg(format!("--aptopt={CHECK_VALID} \"{check}\""));
        }
        if !self.downloads.is_empty() {
            tool = tool.arg(format!("--customize-hook={DOWNLOAD}"));
        }
        let mut packages = 0;
        tool.arg(self.name).arg(&root).arg(mirror).run_lines(|line| {
            if line.starts_with("Setting up ") {
                packages += 1;
                bar.set(packages, 0);
            }
        })?;
        downloads(&debs)?;
        bar.finish();
        cache::put(&root, to)
    }
}

/// The files in a folder, by name.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(folder).at("read", folder)?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}

/// The address of Debian's main archive in this machine's apt sources.
fn mirror(log: &Path) -> Result<String, Error> {
    let mut found = None;
    Tool::new("apt-get", log)
        .args(["indextargets", "--format", "$(LABEL) $(SITE)", "Created-By: Packages", "Component: main"])
        .run_lines(|line| {
            if let Some(site) = line.strip_prefix("Debian ") {
                found.get_or_insert_with(|| site.to_owned());
            }
        })?;
    found.ok_or_else(|| {
        Error::Check("this machine's apt sources have no Debian archive to make a root from".to_owned())
    })
}

/// The value of one of apt's settings on this machine.
fn setting(log: &Path, name: &str) -> Result<Option<String>, Error> {
    let mut found = None;
    Tool::new("apt-config", log)
        .args(["dump", "--format", "%f %v%n", name])
        .run_lines(|line| found = line.strip_prefix(name).map(|value| value.trim().to_owned()))?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_tells_roots_apart() {
        let suite = |packages| Suite { name: "s", packages, downloads: &[], rolling: false };
        assert_ne!(suite(&["a"]).key(), suite(&["b"]).key());
    }

    #[test]
    fn settings_that_are_not_there_are_none() {
        let dir = tempfile::tempdir().unwrap();
        if crate::tools::find("apt-config").is_some() {
            assert_eq!(setting(&dir.path().join("log"), "Apir::No-Such-Setting").unwrap(), None);
        }
    }
}
