//! A VMM of the tests' own: it loads the drop-in as QEMU does, in a process of its own, and plays its guest too.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::unistd::Pid;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set in the process that a test runs its VMM in: the drop-in's path.
const CHILD: &str = "APIR_TEST_VMM";

pub const EINVAL: c_int = nix::libc::EINVAL;
pub const HOST3D: u32 = 2;

pub fn dropin() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libvirglrenderer.so")
}

/// Runs `body` as a VMM in a process of its own, with these environment variables; returns what that process wrote to its
/// standard error. In that process it does not return.
pub fn vmm(test: &str, variables: &[(&str, &Path)], body: impl FnOnce(&Vmm)) -> String {
    vmm_by(Command::new(std::env::current_exe().unwrap()), test, variables, body)
}

/// The same by a command that runs this program.
pub fn vmm_by(
    mut command: Command,
    test: &str,
    variables: &[(&str, &Path)],
    body: impl FnOnce(&Vmm),
) -> String {
    if let Some(dropin) = std::env::var_os(CHILD) {
        body(&Vmm::load(dropin.as_ref()));
        std::process::exit(0);
    }
    let output = command
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env_remove("APIR_LOG")
        .env_remove("APIR_SANDBOX")
        .env_remove("APIR_SANDBOX_PROFILE")
        .env_remove("APIR_LLAMA_CPP_GGML_LIBRARY_REG")
        .env("APIR_WORKER", env!("CARGO_BIN_EXE_apir"))
        .env("APIR_CHAIN", "none")
        .env("VIRGL_APIR_BACKEND_LIBRARY", super::fake_plugin())
        .env("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", "/nonexistent/ggml.so")
        .env("NO_COLOR", "1")
        .envs(variables.iter().copied())
        .env(CHILD, dropin())
        .output()
        .unwrap();
    let lines = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{}{lines}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "the VMM ended with {}", output.status);
    lines
}

/// Compiles a C file of the fixtures.
pub fn compile(source: &str, output: &Path, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(source);
    let status =
        Command::new("cc").args(["-O1", "-o"]).arg(output).arg(source).args(options).status().unwrap();
    assert!(status.success());
}

/// virglrenderer's arguments for a blob.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BlobArgs {
    pub res: u32,
    pub ctx: u32,
    pub mem: u32,
    pub flags: u32,
    pub id: u64,
    pub size: u64,
    pub iov: *const c_void,
    pub count: u32,
}

#[repr(C)]
struct Callbacks {
    version: c_int,
    write_fence: extern "C" fn(*mut c_void, u32),
    graphics: [*const c_void; 4],
    write_context_fence: extern "C" fn(*mut c_void, u32, u32, u64),
    others: [*const c_void; 2],
}

// SAFETY: the pointers are null.
unsafe impl Sync for Callbacks {}

/// Context and ring of a fence where it has them, and its number.
type Told = (Option<(u32, u32)>, u64);

/// The fences that were told.
pub static FENCES: Mutex<Vec<Told>> = Mutex::new(Vec::new());

extern "C" fn write_fence(cookie: *mut c_void, id: u32) {
    assert_eq!(cookie as usize, 0x1234);
    FENCES.lock().unwrap().push((None, id.into()));
}

extern "C" fn write_context_fence(cookie: *mut c_void, context: u32, ring: u32, id: u64) {
    assert_eq!(cookie as usize, 0x1234);
    FENCES.lock().unwrap().push((Some((context, ring)), id));
}

static CALLBACKS: Callbacks = Callbacks {
    version: 3,
    write_fence,
    graphics: [std::ptr::null(); 4],
    write_context_fence,
    others: [std::ptr::null(); 2],
};

/// The drop-in, loaded.
pub struct Vmm {
    library: Library,
}

macro_rules! call {
    ($vmm:expr, $name:literal, fn($($type:ty),*) $(-> $result:ty)?, $($argument:expr),*) => {{
        // SAFETY: the types are those of virglrenderer's header, and what pointers point to lives as long as the call.
        unsafe {
            let function = $vmm.library.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>($name).unwrap();
            function($($argument),*)
        }
    }};
}

impl Vmm {
    fn load(dropin: &Path) -> Self {
        // SAFETY: our own library.
        let library = unsafe { Library::open(Some(dropin), RTLD_NOW | RTLD_LOCAL) }.unwrap();
        Self { library }
    }

    pub fn init(&self, flags: c_int) -> c_int {
        let callbacks = (&raw const CALLBACKS).cast_mut();
        call!(
            self,
            b"virgl_renderer_init",
            fn(usize, c_int, *mut Callbacks) -> c_int,
            0x1234,
            flags,
            callbacks
        )
    }

    pub fn cleanup(&self) {
        call!(self, b"virgl_renderer_cleanup", fn(usize), 0x1234);
    }

    pub fn reset(&self) {
        call!(self, b"virgl_renderer_reset", fn(),);
    }

    pub fn poll(&self) {
        call!(self, b"virgl_renderer_poll", fn(),);
    }

    pub fn poll_fd(&self) -> c_int {
        call!(self, b"virgl_renderer_get_poll_fd", fn() -> c_int,)
    }

    pub fn poll_is_due(&self) -> bool {
        let mut fds = nix::libc::pollfd { fd: self.poll_fd(), events: nix::libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives as long as the call.
        unsafe { nix::libc::poll(&mut fds, 1, 0) == 1 }
    }

    pub fn capset(&self, set: u32) -> (u32, u32) {
        let (mut version, mut size) = (77, 77);
        call!(self, b"virgl_renderer_get_cap_set", fn(u32, *mut u32, *mut u32), set, &mut version, &mut size);
        (version, size)
    }

    pub fn caps(&self, set: u32) -> [u32; 6] {
        // Room for the fake library's largest.
        let mut caps = [0u32; 80];
        call!(self, b"virgl_renderer_fill_caps", fn(u32, u32, *mut u32), set, 0, caps.as_mut_ptr());
        *caps.first_chunk().unwrap()
    }

    pub fn create_context(&self, ctx: u32, capset: u32) -> c_int {
        call!(
            self,
            b"virgl_renderer_context_create_with_flags",
            fn(u32, u32, u32, *const c_char) -> c_int,
            ctx,
            capset,
            4,
            c"test".as_ptr()
        )
    }

    /// A context as made before capsets were named.
    pub fn create_old_context(&self, ctx: u32) -> c_int {
        let name = c"old";
        call!(
            self,
            b"virgl_renderer_context_create",
            fn(u32, u32, *const c_char) -> c_int,
            ctx,
            3,
            name.as_ptr()
        )
    }

    pub fn destroy_context(&self, ctx: u32) {
        call!(self, b"virgl_renderer_context_destroy", fn(u32), ctx);
    }

    pub fn submit_bytes(&self, ctx: u32, bytes: &mut [u8]) -> c_int {
        call!(
            self,
            b"virgl_renderer_submit_cmd",
            fn(*mut u8, c_int, c_int) -> c_int,
            bytes.as_mut_ptr(),
            ctx.cast_signed(),
            (bytes.len() / 4) as c_int
        )
    }

    pub fn submit(&self, ctx: u32, words: &[u32]) -> c_int {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.submit_bytes(ctx, &mut bytes)
    }

    pub fn submit2(&self, ctx: u32, words: &[u32]) -> c_int {
        call!(
            self,
            b"virgl_renderer_submit_cmd2",
            fn(*const u32, c_int, c_int, *const u64, u32) -> c_int,
            words.as_ptr(),
            ctx.cast_signed(),
            words.len() as c_int,
            std::ptr::null(),
            0
        )
    }

    pub fn create_blob(&self, ctx: u32, res: u32, mem: u32, id: u64, size: u64) -> c_int {
        let args = BlobArgs { res, ctx, mem, flags: 1, id, size, iov: std::ptr::null(), count: 0 };
        self.create_blob_with(&args)
    }

    pub fn create_blob_with(&self, args: &BlobArgs) -> c_int {
        call!(self, b"virgl_renderer_resource_create_blob", fn(*const BlobArgs) -> c_int, args)
    }

    pub fn create_resource(&self, res: u32) -> c_int {
        let mut args = [res, 2, 1, 1 << 18, 64, 32, 1, 1, 0, 0, 0];
        call!(
            self,
            b"virgl_renderer_resource_create",
            fn(*mut u32, *const c_void, u32) -> c_int,
            args.as_mut_ptr(),
            std::ptr::null(),
            0
        )
    }

    pub fn unref(&self, res: u32) {
        call!(self, b"virgl_renderer_resource_unref", fn(u32), res);
    }

    pub fn attach(&self, ctx: u32, res: u32) {
        let (ctx, res) = (ctx.cast_signed(), res.cast_signed());
        call!(self, b"virgl_renderer_ctx_attach_resource", fn(c_int, c_int), ctx, res);
    }

    pub fn detach(&self, ctx: u32, res: u32) {
        let (ctx, res) = (ctx.cast_signed(), res.cast_signed());
        call!(self, b"virgl_renderer_ctx_detach_resource", fn(c_int, c_int), ctx, res);
    }

    pub fn map(&self, res: u32) -> Result<Memory, c_int> {
        let (mut map, mut size) = (std::ptr::null_mut::<c_void>(), 0u64);
        let code = call!(
            self,
            b"virgl_renderer_resource_map",
            fn(u32, *mut *mut c_void, *mut u64) -> c_int,
            res,
            &mut map,
            &mut size
        );
        if code == 0 { Ok(Memory { address: map as usize, size }) } else { Err(code) }
    }

    pub fn map_fixed(&self, res: u32, over: Memory) -> c_int {
        call!(self, b"virgl_renderer_resource_map_fixed", fn(u32, usize) -> c_int, res, over.address)
    }

    pub fn map2(&self, res: u32, over: Memory, size: u64) -> c_int {
        let protection = nix::libc::PROT_READ | nix::libc::PROT_WRITE;
        let flags = nix::libc::MAP_SHARED | nix::libc::MAP_FIXED;
        call!(
            self,
            b"virgl_renderer_resource_map2",
            fn(u32, usize, u64, c_int, c_int) -> c_int,
            res,
            over.address,
            size,
            protection,
            flags
        )
    }

    pub fn map_ptr(&self, res: u32) -> Result<usize, c_int> {
        let mut address = 0u64;
        let code = call!(
            self,
            b"virgl_renderer_resource_get_map_ptr",
            fn(u32, *mut u64) -> c_int,
            res,
            &mut address
        );
        if code == 0 { Ok(address as usize) } else { Err(code) }
    }

    pub fn unmap(&self, res: u32) -> c_int {
        call!(self, b"virgl_renderer_resource_unmap", fn(u32) -> c_int, res)
    }

    pub fn map_info(&self, res: u32) -> Result<u32, c_int> {
        let mut info = 0;
        let code =
            call!(self, b"virgl_renderer_resource_get_map_info", fn(u32, *mut u32) -> c_int, res, &mut info);
        if code == 0 { Ok(info) } else { Err(code) }
    }

    pub fn export(&self, res: u32) -> Result<(u32, OwnedFd), c_int> {
        let (mut kind, mut fd) = (0u32, -1);
        let code = call!(
            self,
            b"virgl_renderer_resource_export_blob",
            fn(u32, *mut u32, *mut c_int) -> c_int,
            res,
            &mut kind,
            &mut fd
        );
        if code != 0 {
            return Err(code);
        }
        // SAFETY: the call has just made this descriptor for us.
        Ok((kind, unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Handle, format, width, height, …, and last the descriptor.
    pub fn info(&self, res: u32) -> Result<[u32; 10], c_int> {
        let mut info = [77u32; 10];
        let res = res.cast_signed();
        let code = call!(
            self,
            b"virgl_renderer_resource_get_info",
            fn(c_int, *mut u32) -> c_int,
            res,
            info.as_mut_ptr()
        );
        if code == 0 { Ok(info) } else { Err(code) }
    }

    pub fn info_ext(&self, res: u32) -> c_int {
        let mut info = [0u64; 16];
        let res = res.cast_signed();
        call!(
            self,
            b"virgl_renderer_resource_get_info_ext",
            fn(c_int, *mut u64) -> c_int,
            res,
            info.as_mut_ptr()
        )
    }

    pub fn attach_iov(&self, res: u32, iov: usize, count: c_int) -> c_int {
        let res = res.cast_signed();
        call!(self, b"virgl_renderer_resource_attach_iov", fn(c_int, usize, c_int) -> c_int, res, iov, count)
    }

    pub fn detach_iov(&self, res: u32) -> (usize, c_int) {
        let (mut iov, mut count) = (0usize, 0);
        call!(
            self,
            b"virgl_renderer_resource_detach_iov",
            fn(c_int, *mut usize, *mut c_int),
            res.cast_signed(),
            &mut iov,
            &mut count
        );
        (iov, count)
    }

    pub fn transfer_write(&self, res: u32, ctx: u32) -> c_int {
        let region = [0u32, 0, 0, 1, 1, 1];
        call!(
            self,
            b"virgl_renderer_transfer_write_iov",
            fn(u32, u32, c_int, u32, u32, *const u32, u64, usize, u32) -> c_int,
            res,
            ctx,
            0,
            0,
            0,
            region.as_ptr(),
            0,
            0,
            0
        )
    }

    pub fn cursor(&self, res: u32) -> usize {
        let (mut width, mut height) = (0u32, 0u32);
        call!(
            self,
            b"virgl_renderer_get_cursor_data",
            fn(u32, *mut u32, *mut u32) -> usize,
            res,
            &mut width,
            &mut height
        )
    }

    pub fn create_fence(&self, id: c_int) -> c_int {
        call!(self, b"virgl_renderer_create_fence", fn(c_int, u32) -> c_int, id, 0)
    }

    pub fn create_context_fence(&self, ctx: u32, ring: u32, id: u64) -> c_int {
        call!(self, b"virgl_renderer_context_create_fence", fn(u32, u32, u32, u64) -> c_int, ctx, 1, ring, id)
    }

    /// Sends the drop-in's lines to [`LINES`], or to standard error again.
    pub fn log_to_lines(&self, on: bool) {
        extern "C" fn line(level: u32, line: *const c_char, data: *mut c_void) {
            assert_eq!(data as usize, 0x5678);
            // SAFETY: the drop-in's line is a C string.
            let line = unsafe { std::ffi::CStr::from_ptr(line) };
            LINES.lock().unwrap().push((level, line.to_str().unwrap().to_owned()));
        }
        extern "C" fn free(data: *mut c_void) {
            assert_eq!(data as usize, 0x5678);
            FREED.fetch_add(1, Ordering::Relaxed);
        }
        type Line = extern "C" fn(u32, *const c_char, *mut c_void);
        type Free = extern "C" fn(*mut c_void);
        let (line, free) = (on.then_some(line as Line), on.then_some(free as Free));
        call!(self, b"virgl_set_log_callback", fn(Option<Line>, usize, Option<Free>), line, 0x5678, free);
    }
}

pub static LINES: Mutex<Vec<(u32, String)>> = Mutex::new(Vec::new());
pub static FREED: AtomicU32 = AtomicU32::new(0);

/// A mapping that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub address: usize,
    pub size: u64,
}

impl Memory {
    /// Anonymous memory to be mapped over.
    pub fn anonymous(size: usize) -> Self {
        let mapping = memmap2::MmapOptions::new().len(size).map_anon().unwrap();
        let memory = Self { address: mapping.as_ptr() as usize, size: size as u64 };
        std::mem::forget(mapping);
        memory
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset as u64 + 4 <= self.size);
        // SAFETY: inside a live mapping; the tests keep to those.
        unsafe { &*((self.address + offset) as *const AtomicU32) }
    }

    pub fn load(&self, offset: usize) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    pub fn store(&self, offset: usize, value: u32) {
        self.word(offset).store(value, Ordering::Release);
    }
}

/// A guest's context with one reply blob.
pub struct Guest<'a> {
    pub vmm: &'a Vmm,
    pub ctx: u32,
    pub offset: u32,
    pub res: u32,
    pub reply: Memory,
}

impl<'a> Guest<'a> {
    /// A context of this capset with a reply blob, whose resource id is 100 times the context's.
    pub fn new(vmm: &'a Vmm, ctx: u32, capset: u32) -> Self {
        assert_eq!(vmm.create_context(ctx, capset), 0);
        let res = ctx * 100;
        assert_eq!(vmm.create_blob(ctx, res, HOST3D, 0, 0x4000), 0);
        // As QEMU does next.
        assert!(vmm.info(res).is_ok());
        vmm.attach(ctx, res);
        let reply = vmm.map(res).unwrap();
        Self { vmm, ctx, offset: if capset == 4 { 331 } else { 0 }, res, reply }
    }

    /// The same with the library loaded.
    pub fn ready(vmm: &'a Vmm, ctx: u32, capset: u32) -> Self {
        let guest = Self::new(vmm, ctx, capset);
        assert_eq!(guest.call(0, 0, &[0, 2]), 0xab1f);
        assert_eq!(guest.call(1, 0, &[]), 1);
        guest
    }

    pub fn submit(&self, type_: u32, flags: u32, words: &[u32]) -> c_int {
        let mut command = vec![type_ + self.offset, flags, self.res];
        command.extend(words);
        self.reply.store(0, 0);
        self.vmm.submit(self.ctx, &command)
    }

    pub fn answer(&self) -> u32 {
        super::eventually("an answer", || self.reply.load(0) != 0);
        self.reply.load(0)
    }

    pub fn call(&self, type_: u32, flags: u32, words: &[u32]) -> u32 {
        assert_eq!(self.submit(type_, flags, words), 0);
        self.answer()
    }

    pub fn forward(&self, command: u32, words: &[u32]) -> u32 {
        self.call(2, command, words)
    }

    /// That its worker is alive and does what it should.
    pub fn check(&self) {
        assert_eq!(self.forward(1, &[41, 42]), 5);
        assert_eq!((self.reply.load(4), self.reply.load(8)), (41, 42));
    }

    /// That it has been given up, and is told so.
    pub fn check_lost(&self) {
        assert_eq!(self.submit(2, 1, &[41]), EINVAL);
        assert_eq!(self.reply.load(0), 2);
    }
}

/// The processes that this one has started and that are not gone.
pub fn children() -> Vec<Pid> {
    // The kernel's own lists of children may leave some out while others end.
    let pids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let parent = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let mut found: Vec<i32> = pids.filter(|pid| parent(pid) == Some(std::process::id())).collect();
    found.sort();
    found.into_iter().map(Pid::from_raw).collect()
}
