//! Programs in a real virtual machine: stock QEMU, Debian's kernel, our renderer, our plugin, our guest library.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use apir_tests::Error;
use apir_tests::completion::{Completion, Request};
use apir_tests::error::check;
use apir_tests::ggml_program::{GgmlProgram, check_remote};
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::process;
use apir_tests::program::Program;
use apir_tests::vm::{Boot, Guest, Job, Renderer, Steps, VmDir, contexts_program};
use nix::sys::signal::Signal;

/// How long one program may take in an emulated machine.
const LIMIT: Duration = Duration::from_secs(120);

/// How long a program may take to end after its worker is gone.
const END_LIMIT: Duration = Duration::from_secs(20);

/// The same for a worker that is silent, for ten seconds at first.
const SILENCE_LIMIT: Duration = Duration::from_secs(90);

const TOKENS: u32 = 16;

struct Pieces {
    dist: Dist,
    llama: LlamaDir,
    dir: VmDir,
}

impl Pieces {
    fn from_env() -> Result<Self, Error> {
        Ok(Self { dist: Dist::from_env()?, llama: LlamaDir::from_env()?, dir: VmDir::from_env()? })
    }

    fn renderer(&self) -> Renderer {
        Renderer::new(&self.dist, &self.llama.cpu_library())
    }

    fn boot(&self, renderer: Renderer) -> Result<Guest, Error> {
        Boot::new(&self.dir, self.dir.accelerator()?).renderer(renderer).start()
    }

    fn request(&self) -> Result<Request, Error> {
        Ok(Request::new(&self.llama, &Models::from_env()?.tiny(), TOKENS))
    }

    /// A program that uses our device again and again.
    fn program(&self) -> GgmlProgram {
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), self.llama.path(), &self.dist)
    }

    fn repeat<'a>(&self, guest: &'a Guest, count: &str) -> Result<Job<'a>, Error> {
        let job = guest.start(&self.program().command(&["repeat", "--warm-up", "1", "--count", count]))?;
        job.wait_for("compute", LIMIT, |text| text.contains("\"ready\"").then_some(()))?;
        Ok(job)
    }
}

/// ggml's own tests of some operations, in the guest; in one run, since its start takes longest there.
fn operations(pieces: &Pieces, guest: &Guest, names: &[&str]) -> Result<(), Error> {
    let program = Program::new(&pieces.llama.program("test-backend-ops"))
        .args(["test", "-b", "[virtgpu] CPU", "-o", &names.join(",")])
        .env("GGML_BACKEND_PATH", pieces.dist.guest());
    let output = guest.run(&program, LIMIT)?.success()?;
    for name in names {
        let case = format!("  {name}(");
        let good = output.stdout.lines().any(|line| line.starts_with(&case) && line.contains("OK"));
        check(good, || format!("no case of {name} ran:\n{}", output.stdout))?;
    }
    Ok(())
}

fn generation(pieces: &Pieces, guest: &Guest, reference: &Completion) -> Result<(), Error> {
    let (remote, stats) = pieces.request()?.run_remote(&guest.loading(&pieces.dist.guest()))?;
    remote.check_all_remote()?;
    check(remote.text == reference.text, || {
        format!("the texts differ:\n--- remote\n{}\n--- local\n{}", remote.text, reference.text)
    })?;
    check(stats.transport == "virtgpu" && stats.device == "[virtgpu] CPU", || format!("{stats:?}"))
}

/// Two programs have a worker each; the end of one by force is no matter to the other.
fn a_killed_program(pieces: &Pieces, guest: &Guest) -> Result<(), Error> {
    let victim = pieces.repeat(guest, "1000000000")?;
    let survivor = pieces.repeat(guest, "2000")?;
    check(guest.workers().len() == 2, || format!("the workers are {:?}", guest.workers()))?;
    let pid = victim.pid(LIMIT)?.to_string();
    guest.run(&Program::new(Path::new("/bin/kill")).args(["-9", &pid]), LIMIT)?.success()?;
    let output = victim.wait(LIMIT)?;
    check(output.status.signal() == Some(9), || format!("it ended with {}", output.status))?;
    survivor.wait(LIMIT)?.success()?;
    check(process::wait_until(END_LIMIT, || guest.workers().is_empty()), || {
        format!("workers are left: {:?}", guest.workers())
    })
}

/// Row T25: forks of a program leave it alone, and have contexts of their own when they use the device.
fn a_program_that_forks(pieces: &Pieces, guest: &Guest) -> Result<(), Error> {
    let output = guest.run(&pieces.program().command(&["forks"]), LIMIT)?.success()?;
    let lost = output.stderr.matches("of which this process is a fork").count();
    check(lost == 6, || output.stderr.clone())?;
    check(process::wait_until(END_LIMIT, || guest.workers().is_empty()), || {
        format!("workers are left: {:?}", guest.workers())
    })
}

/// A worker that is killed ends its program, by an error; the machine and its next program go on.
fn a_killed_worker(pieces: &Pieces, guest: &Guest) -> Result<(), Error> {
    let victim = pieces.repeat(guest, "1000000000")?;
    let workers = guest.workers();
    check(workers.len() == 1, || format!("the workers are {workers:?}"))?;
    process::signal(workers[0], Signal::SIGKILL)?;
    victim.wait(END_LIMIT)?.failed_by_itself()?;
    check_remote(&guest.run(&pieces.program().command(&["compute"]), LIMIT)?.success()?)
}

/// A worker that is stopped ends its program too, and the machine runs on meanwhile.
fn a_stopped_worker(pieces: &Pieces, guest: &Guest) -> Result<(), Error> {
    let victim = pieces.repeat(guest, "1000000000")?;
    let workers = guest.workers();
    check(workers.len() == 1, || format!("the workers are {workers:?}"))?;
    process::signal(workers[0], Signal::SIGSTOP)?;
    check_remote(&guest.run(&pieces.program().command(&["compute"]), LIMIT)?.success()?)?;
    let output = victim.wait(SILENCE_LIMIT)?.failed_by_itself()?;
    check(output.stderr.contains("no sign of life"), || output.stderr.clone())?;
    check(process::wait_until(END_LIMIT, || !process::is_alive(workers[0])), || {
        "the stopped worker outlives its program".to_owned()
    })
}

#[test]
#[ignore = "needs a virtual machine: cargo xtask test runs it"]
fn programs_in_a_machine() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let reference = pieces.request()?.run_local()?;
    let guest = pieces.boot(pieces.renderer())?;
    let mut steps = Steps::default();
    steps.check("ggml's own tests", || operations(&pieces, &guest, &["SCALE", "RMS_NORM"]));
    steps.check("a small model", || generation(&pieces, &guest, &reference));
    steps.check("a killed program leaves the other computing", || a_killed_program(&pieces, &guest));
    steps.check("t25: forks leave their program alone", || a_program_that_forks(&pieces, &guest));
    steps.check("a killed worker ends its program only", || a_killed_worker(&pieces, &guest));
    steps.check("a stopped worker ends its program only", || a_stopped_worker(&pieces, &guest));
    steps.check("the machine ends as it should", || guest.stop()?.success().map(drop));
    steps.finish()
}

#[test]
#[ignore = "needs a virtual machine: cargo xtask test runs it"]
fn contexts_of_the_real_renderer_beside_ours() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let reference = pieces.request()?.run_local()?;
    let guest = pieces.boot(pieces.renderer().chained())?;
    let contexts = contexts_program(guest.folder(), &pieces.dir)?;
    let mut steps = Steps::default();
    steps.check("Venus and virgl before any of ours", || {
        guest.run(&Program::new(&contexts).arg("2"), LIMIT)?.success().map(drop)
    });
    steps.check("Venus, virgl and ours at the same time", || {
        let ours = pieces.repeat(&guest, "1000000000")?;
        guest.run(&Program::new(&contexts).arg("20"), LIMIT)?.success()?;
        check(ours.status().is_none(), || "our program ended".to_owned())?;
        let theirs = guest.start(&Program::new(&contexts).arg("1000000"))?;
        theirs.wait_for("have contexts", LIMIT, |text| text.contains("round 2\n").then_some(()))?;
        check_remote(&guest.run(&pieces.program().command(&["compute"]), LIMIT)?.success()?)?;
        generation(&pieces, &guest, &reference)?;
        check(theirs.status().is_none(), || "their program ended".to_owned())
    });
    steps.finish()
}
