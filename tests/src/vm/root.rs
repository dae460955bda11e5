//! Running a program in another root, in a mount namespace of its own: nothing is left behind when it ends.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::{Error, IoContext};
use crate::program::Program;

/// Lays a writable layer over the root and binds host files into it. Arguments: the root, an empty folder, pairs of
/// host path and path inside, `--`, the command. All by exec, so that the process id stays that of the program.
const ENTER: &str = r#"
set -eu
lower=$1 work=$2
shift 2
mount -t tmpfs apir "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=$lower,upperdir=$work/upper,workdir=$work/work" apir "$work/root"
mount --rbind /dev "$work/root/dev"
mount -t proc proc "$work/root/proc"
while [ "$1" != -- ]; do
    inside=$work/root$2
    if [ -d "$1" ]; then
        mkdir -p "$inside"
    else
        mkdir -p "${inside%/*}"
        : > "$inside"
    fi
    mount --rbind "$1" "$inside"
    shift 2
done
shift
exec setpriv --pdeathsig KILL chroot "$work/root" "$@"
"#;

/// A root folder with files of the host bound into it.
#[derive(Debug)]
pub struct Root {
    lower: PathBuf,
    binds: Vec<(PathBuf, PathBuf)>,
    // The mount point of the writable layer, which exists in the program's namespace only.
    work: TempDir,
}

impl Root {
    /// The root in `folder`, which stays as it is.
    ///
    /// # Errors
    /// Not run as root, or the root is not there.
    pub fn new(folder: &Path) -> Result<Self, Error> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::Unexpected(format!(
                "programs of {} run in a mount namespace: run this as root",
                folder.display()
            )));
        }
        if !folder.is_dir() {
            return Err(Error::Missing {
                path: folder.to_owned(),
                what: "a root folder made by cargo xtask",
            });
        }
        let work = TempDir::with_prefix("apir-root-").at("create a folder in", &std::env::temp_dir())?;
        Ok(Self { lower: folder.to_owned(), binds: Vec::new(), work })
    }

    /// Makes a file or folder of the host visible under the same path, and under that which links in it lead to.
    #[must_use]
    pub fn with(self, path: &Path) -> Self {
        match path.canonicalize() {
            Ok(real) if real != path => self.with_at(path, path).with_at(&real, &real),
            _ => self.with_at(path, path),
        }
    }

    /// Makes a file or folder of the host visible under another path.
    #[must_use]
    pub fn with_at(mut self, path: &Path, inside: &Path) -> Self {
        self.binds.push((path.to_owned(), inside.to_owned()));
        self
    }

    /// A program of the root, by its name there.
    pub fn program(&self, program: &str) -> Program {
        let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut enter = Program::new(Path::new("unshare"))
            .called(&name)
            .args(["--mount", "--", "sh", "-c", ENTER, "enter"])
            .arg(&self.lower)
            .arg(self.work.path());
        for (path, inside) in &self.binds {
            enter = enter.arg(path).arg(inside);
        }
        enter.args(["--", program]).env("HOME", "/root")
    }
}
