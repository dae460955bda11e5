//! Which layout of the backend structs a ggml library uses.
//!
//! ggml changed its structs several times under one API number, so the layout follows from the library's version and from symbols it exports.

use std::ffi::c_void;
use std::fmt;
use std::str::FromStr;

use crate::abi;
use crate::error::Error;

/// Oldest ggml that is supported, on both sides: structs and kernels of older releases are not checked. README and docs name it.
pub const OLDEST_VERSION: Version = Version::new(0, 13, 0);

/// Since when devices say whether a mapped file may be loaded.
const MMAP_CAP_VERSION: Version = Version::new(0, 19, 0);
/// The oldest version known to call `graph_optimize` with three arguments; 0.21.0 used two.
const OPTIMIZE_PARAMS_VERSION: Version = Version::new(0, 25, 1);

/// A ggml version, as `ggml_version()` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub patch: u32,
}

impl Version {
    /// The version of these three numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for Version {
    type Err = Error;

    /// Reads `major.minor.patch`; whatever follows the third number's digits (such as `-dev`) is ignored.
    fn from_str(text: &str) -> Result<Self, Error> {
        let mut parts = text.splitn(3, '.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part.get(..digits).and_then(|number| number.parse::<u32>().ok())
        });
        match (parts.next(), parts.next(), parts.next()) {
            (Some(Some(major)), Some(Some(minor)), Some(Some(patch))) => Ok(Self { major, minor, patch }),
            _ => Err(Error::VersionUnreadable { text: text.to_owned() }),
        }
    }
}

/// The layout of one ggml library's structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    version: Version,
    api_version: u32,
    graph_has_uid: bool,
}

/// Symbols of libggml-base whose presence tells layouts of the same version number apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Exports `ggml_backend_buft_alloc_buffer_n`: it came with API 3.
    pub alloc_buffer_n: bool,
    /// Exports `ggml_graph_next_uid`: it came with the uid of a graph.
    pub graph_next_uid: bool,
}

impl Marks {
    /// Symbol of [`Marks::alloc_buffer_n`].
    pub(crate) const ALLOC_BUFFER_N: &'static std::ffi::CStr = c"ggml_backend_buft_alloc_buffer_n";
    /// Symbol of [`Marks::graph_next_uid`].
    pub(crate) const GRAPH_NEXT_UID: &'static std::ffi::CStr = c"ggml_graph_next_uid";
}

impl Layout {
    /// The layout of a ggml of this version that has these marks.
    ///
    /// # Errors
    ///
    /// [`Error::VersionUnsupported`] before [`OLDEST_VERSION`].
    pub fn new(version: Version, marks: Marks) -> Result<Self, Error> {
        if version < OLDEST_VERSION {
            return Err(Error::VersionUnsupported { version });
        }
        Ok(Self {
            version,
            api_version: if marks.alloc_buffer_n { 3 } else { 2 },
            graph_has_uid: marks.graph_next_uid,
        })
    }

    /// Version of the ggml library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// `GGML_BACKEND_API_VERSION` that a backend beside it must answer: 2 or 3.
    pub fn api_version(&self) -> u32 {
        self.api_version
    }

    /// Whether devices have the fifth ability, [`abi::DeviceCaps::mmap_support`]; a device without it allows mapped files.
    pub fn has_mmap_cap(&self) -> bool {
        self.version >= MMAP_CAP_VERSION
    }

    /// Whether `graph_optimize` surely gets its third argument.
    ///
    /// It came between 0.21.0 and 0.25.1. For the versions between, the answer is no: a callee must not trust the argument there.
    pub fn graph_optimize_has_params(&self) -> bool {
        self.version >= OPTIMIZE_PARAMS_VERSION
    }

    /// Whether a graph has [`abi::CGraph::uid`]; without it the struct ends 8 bytes earlier.
    pub fn graph_has_uid(&self) -> bool {
        self.graph_has_uid
    }

    /// The backend data of a buffer type.
    ///
    /// # Safety
    ///
    /// `buffer_type` points to a buffer type of this layout.
    pub unsafe fn buffer_type_context(&self, buffer_type: *const abi::BufferType) -> *mut c_void {
        // SAFETY: the caller says that the struct has this layout.
        unsafe {
            match self.api_version {
                2 => (*buffer_type.cast::<abi::BufferTypeV2>()).context,
                _ => (*buffer_type.cast::<abi::BufferTypeV3>()).context,
            }
        }
    }

    /// The device of a buffer type, which may be null.
    ///
    /// # Safety
    ///
    /// `buffer_type` points to a buffer type of this layout.
    pub unsafe fn buffer_type_device(&self, buffer_type: *const abi::BufferType) -> *mut abi::Device {
        // SAFETY: the caller says that the struct has this layout.
        unsafe {
            match self.api_version {
                2 => (*buffer_type.cast::<abi::BufferTypeV2>()).device,
                _ => (*buffer_type.cast::<abi::BufferTypeV3>()).device,
            }
        }
    }

    /// The functions of a buffer type, those that API 2 has too.
    ///
    /// # Safety
    ///
    /// `buffer_type` points to a buffer type of this layout.
    pub unsafe fn buffer_type_iface(&self, buffer_type: *const abi::BufferType) -> abi::BufferTypeIfaceV2 {
        // SAFETY: the caller says that the struct has this layout.
        unsafe {
            match self.api_version {
                2 => (*buffer_type.cast::<abi::BufferTypeV2>()).iface,
                _ => {
                    let iface = (*buffer_type.cast::<abi::BufferTypeV3>()).iface;
                    abi::BufferTypeIfaceV2 {
                        get_name: iface.get_name,
                        alloc_buffer: iface.alloc_buffer,
                        get_alignment: iface.get_alignment,
                        get_max_size: iface.get_max_size,
                        get_alloc_size: iface.get_alloc_size,
                        is_host: iface.is_host,
                    }
                }
            }
        }
    }
}

/// A buffer type of one's own, in the layout of the ggml it is given to. Its address stays the same when the box is moved.
#[derive(Debug)]
pub enum BufferTypeBox {
    /// In the layout of API 2.
    V2(Box<abi::BufferTypeV2>),
    /// In the layout of API 3, the slots that API 2 has not are null.
    V3(Box<abi::BufferTypeV3>),
}

impl BufferTypeBox {
    /// A buffer type with these functions.
    pub fn new(
        layout: &Layout,
        iface: abi::BufferTypeIfaceV2,
        device: *mut abi::Device,
        context: *mut c_void,
    ) -> Self {
        match layout.api_version {
            2 => Self::V2(Box::new(abi::BufferTypeV2 { iface, device, context })),
            _ => Self::V3(Box::new(abi::BufferTypeV3 {
                iface: abi::BufferTypeIfaceV3 {
                    get_name: iface.get_name,
                    alloc_buffer: iface.alloc_buffer,
                    alloc_buffer_n: None,
                    get_alignment: iface.get_alignment,
                    get_max_size: iface.get_max_size,
                    get_alloc_size: iface.get_alloc_size,
                    get_alloc_size_n: None,
                    is_host: iface.is_host,
                },
                device,
                context,
            })),
        }
    }

    /// The pointer ggml knows it by; valid while the box lives.
    pub fn as_ptr(&self) -> *mut abi::BufferType {
        match self {
            Self::V2(buffer_type) => (&raw const **buffer_type).cast_mut().cast(),
            Self::V3(buffer_type) => (&raw const **buffer_type).cast_mut().cast(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Marks = Marks { alloc_buffer_n: true, graph_next_uid: true };

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    #[test]
    fn versions_are_read_and_ordered() {
        assert_eq!(version("0.26.0"), Version::new(0, 26, 0));
        assert_eq!(version("0.9.11-dev").to_string(), "0.9.11");
        assert_eq!(version("1.2.3.4").to_string(), "1.2.3");
        assert!(version("0.9.11") < version("0.10.0"));
        for bad in ["", "0.26", "a.b.c", "0..1", "0.26.", "-1.2.3", "0.26.99999999999"] {
            assert!(bad.parse::<Version>().is_err(), "{bad} is no version");
        }
    }

    #[test]
    fn api_follows_the_exported_symbol() {
        let old = Marks { alloc_buffer_n: false, graph_next_uid: true };
        assert_eq!(Layout::new(version("0.25.1"), old).unwrap().api_version(), 2);
        assert_eq!(Layout::new(version("0.26.0"), NEW).unwrap().api_version(), 3);
        assert!(Layout::new(version("0.25.1"), old).unwrap().graph_optimize_has_params());
        assert!(!Layout::new(version("0.23.0"), old).unwrap().graph_optimize_has_params());
        assert!(Layout::new(version("0.19.0"), old).unwrap().has_mmap_cap());
        assert!(!Layout::new(version("0.18.3"), old).unwrap().has_mmap_cap());
    }

    #[test]
    fn too_old_a_ggml_is_refused_by_name() {
        let error = Layout::new(version("0.12.9"), NEW).unwrap_err();
        assert_eq!(error.to_string(), "ggml: too old (0.12.9, oldest supported 0.13.0)");
        assert!(Layout::new(OLDEST_VERSION, NEW).is_ok());
    }

    #[test]
    fn the_readme_names_the_oldest_version() {
        let readme = include_str!("../../README.md");
        let named = format!("ggml {OLDEST_VERSION} ");
        assert!(readme.contains(&named), "README.md does not say \"{named}\"");
    }

    #[test]
    fn buffer_types_read_back_in_both_layouts() {
        unsafe extern "C" fn alignment(_: *mut abi::BufferType) -> usize {
            64
        }
        let iface = abi::BufferTypeIfaceV2 {
            get_name: None,
            alloc_buffer: None,
            get_alignment: Some(alignment),
            get_max_size: None,
            get_alloc_size: None,
            is_host: None,
        };
        for alloc_buffer_n in [false, true] {
            let marks = Marks { alloc_buffer_n, graph_next_uid: true };
            let layout = Layout::new(version("0.26.0"), marks).unwrap();
            let device = 0x1000 as *mut abi::Device;
            let context = 0x2000 as *mut c_void;
            let buffer_type = BufferTypeBox::new(&layout, iface, device, context);
            let pointer = buffer_type.as_ptr();
            // SAFETY: the box was made for this layout.
            unsafe {
                assert_eq!(layout.buffer_type_device(pointer), device);
                assert_eq!(layout.buffer_type_context(pointer), context);
                let read = layout.buffer_type_iface(pointer);
                assert_eq!(read.get_alignment.map(|f| f(pointer)), Some(64));
                assert!(read.alloc_buffer.is_none() && read.is_host.is_none());
            }
        }
    }
}
