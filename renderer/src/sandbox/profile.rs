//! What each kind of backend needs of the system.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::Path;

/// A kind of backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// The processor: no device.
    Cpu,
    /// Vulkan, by Mesa's drivers or NVIDIA's.
    Vulkan,
    /// CUDA.
    Cuda,
    /// HIP on ROCm.
    Rocm,
    /// What all of them need together, for a library whose name says nothing.
    Any,
}

/// A right to a file, or to a folder and all below it. The last part of a path may end in `*`.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    /// To read.
    Read(&'static str),
    /// To list a folder, and those below it.
    List(&'static str),
    /// To read, write and control a device.
    Device(&'static str),
}

use Right::{Device, List, Read};

/// What every backend needs: the loader's files, and what the C library and ggml ask of the system.
const COMMON: &[Right] = &[
    Read("/lib*"),
    Read("/usr/lib*"),
    Read("/usr/local/lib*"),
    Read("/nix/store"),
    Read("/gnu/store"),
    Read("/etc/ld.so.cache"),
    Read("/etc/ld.so.preload"),
    Read("/proc/cpuinfo"),
    Read("/proc/meminfo"),
    Read("/proc/stat"),
    Read("/proc/sys/vm/overcommit_memory"),
    Read("/sys/devices/system/cpu"),
    Read("/sys/devices/system/node"),
    Read("/sys/kernel/mm/transparent_hugepage"),
    Read("/dev/random"),
    Read("/dev/urandom"),
    Device("/dev/null"),
    Device("/dev/zero"),
];

/// What drivers of GPUs look at to find them.
const GPU: &[Right] = &[
    Read("/proc/devices"),
    Read("/proc/driver/nvidia*"),
    Read("/proc/version"),
    Read("/sys/bus/pci"),
    Read("/sys/class/drm"),
    Read("/sys/dev/char"),
    Read("/sys/devices/pci*"),
    Read("/sys/devices/platform"),
    Read("/sys/module/amdgpu"),
    Read("/sys/module/i915"),
    Read("/sys/module/nvidia*"),
    Read("/sys/module/xe"),
    Read("/usr/share/drirc.d"),
    Read("/usr/share/libdrm"),
];

const NVIDIA: &[Right] = &[
    Device("/dev/nvidia*"),
    Device("/dev/nvhost*"),
    Device("/dev/nvmap"),
    Device("/dev/nvgpu"),
    Device("/dev/dxg"),
    Read("/usr/local/nvidia"),
    Read("/usr/share/nvidia"),
    Read("/run/opengl-driver"),
];

/// What computes on a GPU; which there are is found by listing the folder.
const RENDER_NODES: &[Right] = &[List("/dev/dri"), Device("/dev/dri/renderD*")];

/// What also sets modes, and shares buffers by names that can be guessed. Who opens one first is its master.
const CARD_NODES: &[Right] = &[Device("/dev/dri/card*")];

const VULKAN: &[Right] = &[
    Read("/etc/vulkan"),
    Read("/usr/local/etc/vulkan"),
    Read("/usr/local/share/vulkan"),
    Read("/usr/share/vulkan"),
];

const CUDA: &[Right] = &[Read("/opt/cuda*"), Read("/usr/local/cuda*")];

const ROCM: &[Right] = &[
    Device("/dev/kfd"),
    Read("/opt/amdgpu*"),
    Read("/opt/rocm*"),
    Read("/sys/class/kfd"),
    Read("/sys/devices/virtual/kfd"),
];

const OTHERS: &[Right] = &[Read("/etc/OpenCL"), Read("/opt/intel")];

impl Profile {
    /// All names, for a message.
    pub(super) const NAMES: &'static str = "cpu, vulkan, cuda, rocm or any";

    /// The profile with a name.
    pub(super) fn named(name: &str) -> Option<Self> {
        [Self::Cpu, Self::Vulkan, Self::Cuda, Self::Rocm, Self::Any]
            .into_iter()
            .find(|profile| profile.name() == name)
    }

    /// What a backend library's file name tells; [`Profile::Any`] when that is nothing.
    #[must_use]
    pub fn of(ggml_library: Option<&Path>) -> Self {
        let name =
            ggml_library.and_then(Path::file_name).map(|name| name.to_string_lossy().to_ascii_lowercase());
        let Some(name) = name else { return Self::Any };
        let known = [
            ("cuda", Self::Cuda),
            ("vulkan", Self::Vulkan),
            ("hip", Self::Rocm),
            ("rocm", Self::Rocm),
            ("cpu", Self::Cpu),
            ("blas", Self::Cpu),
        ];
        known.into_iter().find(|(part, _)| name.contains(part)).map_or(Self::Any, |(_, profile)| profile)
    }

    /// Whether it drives a GPU.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn has_gpu(self) -> bool {
        self != Self::Cpu
    }

    /// What it may open, with the card nodes of the GPUs that it drives by DRM or without.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    pub(super) fn rights(self, card_nodes: bool) -> impl Iterator<Item = Right> {
        let tables: &[&[Right]] = match self {
            Self::Cpu => &[COMMON],
            Self::Vulkan => &[COMMON, GPU, NVIDIA, RENDER_NODES, VULKAN],
            Self::Cuda => &[COMMON, GPU, NVIDIA, CUDA],
            Self::Rocm => &[COMMON, GPU, RENDER_NODES, ROCM],
            Self::Any => &[COMMON, GPU, NVIDIA, RENDER_NODES, VULKAN, CUDA, ROCM, OTHERS],
        };
        let cards = if card_nodes && tables.contains(&RENDER_NODES) { CARD_NODES } else { &[] };
        tables.iter().flat_map(|table| table.iter().copied()).chain(cards.iter().copied())
    }

    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Vulkan => "vulkan",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Any => "any",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_s_name_tells_the_profile() {
        for (file, profile) in [
            ("/opt/cuda/libggml-cpu-haswell.so", Profile::Cpu),
            ("libggml-blas.so", Profile::Cpu),
            ("libggml-cuda.so.0", Profile::Cuda),
            ("libggml-Vulkan.so", Profile::Vulkan),
            ("libggml-hip.so", Profile::Rocm),
            ("libggml-sycl.so", Profile::Any),
            ("ggml.so", Profile::Any),
        ] {
            assert_eq!(Profile::of(Some(Path::new(file))), profile, "{file}");
        }
        assert_eq!(Profile::of(None), Profile::Any);
    }

    #[test]
    fn no_gpu_is_in_the_cpu_s_profile() {
        let devices: Vec<_> = Profile::Cpu.rights(true).filter(|right| matches!(right, Device(_))).collect();
        assert_eq!(devices, [Device("/dev/null"), Device("/dev/zero")]);
    }

    #[test]
    fn card_nodes_are_opened_where_they_are_asked_for() {
        let all = [Profile::Cpu, Profile::Vulkan, Profile::Cuda, Profile::Rocm, Profile::Any];
        for (profile, render) in all.into_iter().zip([false, true, false, true, true]) {
            for asked in [false, true] {
                let nodes: Vec<_> = profile
                    .rights(asked)
                    .filter(|right| matches!(right, Device(path) if path.starts_with("/dev/dri")))
                    .collect();
                let mut expected = vec![];
                expected.extend(render.then_some(Device("/dev/dri/renderD*")));
                expected.extend((render && asked).then_some(Device("/dev/dri/card*")));
                assert_eq!(nodes, expected, "{profile} {asked}");
            }
        }
    }
}
