//! Reading tensors and graphs that ggml, or a [`crate::graph::Graph`], holds.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::abi::{self, MAX_DIMS, MAX_SRC, OP_PARAM_WORDS};
use crate::layout::Layout;
use crate::types::{ExtentError, extent};

/// A tensor whose operands, view source and their operands in turn may be read for `'a`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorRef<'a> {
    tensor: NonNull<abi::Tensor>,
    lifetime: PhantomData<&'a abi::Tensor>,
}

impl<'a> TensorRef<'a> {
    /// The tensor at a pointer, none for null.
    ///
    /// # Safety
    ///
    /// For `'a`, the tensor and all it reaches by `src` and `view_src` are valid and not changed by another thread.
    pub unsafe fn from_ptr(tensor: *const abi::Tensor) -> Option<Self> {
        NonNull::new(tensor.cast_mut()).map(|tensor| Self { tensor, lifetime: PhantomData })
    }

    /// The pointer ggml knows it by.
    pub fn as_ptr(self) -> *const abi::Tensor {
        self.tensor.as_ptr()
    }

    /// Its address, unlike that of any other tensor of the graph.
    pub fn address(self) -> usize {
        self.as_ptr().addr()
    }

    /// Number of the element type.
    pub fn type_number(self) -> u32 {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).type_ }
    }

    /// The buffer its data lies in, or null.
    pub fn buffer(self) -> *mut abi::Buffer {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).buffer }
    }

    /// Elements in each dimension.
    pub fn shape(self) -> [i64; MAX_DIMS] {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).ne }
    }

    /// Byte strides of each dimension.
    pub fn strides(self) -> [u64; MAX_DIMS] {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).nb }
    }

    /// Number of the operation.
    pub fn op(self) -> u32 {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).op }
    }

    /// Parameters of the operation.
    pub fn op_params(self) -> [i32; OP_PARAM_WORDS] {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).op_params }
    }

    /// `FLAG_*` bits.
    pub fn flags(self) -> i32 {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).flags }
    }

    /// Its operands, none in the places it does not use.
    pub fn sources(self) -> [Option<TensorRef<'a>>; MAX_SRC] {
        // SAFETY: `from_ptr` was given a valid tensor, its sources are valid too.
        unsafe { (*self.as_ptr()).src.map(|source| TensorRef::from_ptr(source)) }
    }

    /// The tensor it is a view of.
    pub fn view_src(self) -> Option<TensorRef<'a>> {
        // SAFETY: `from_ptr` was given a valid tensor, its view source is valid too.
        unsafe { TensorRef::from_ptr((*self.as_ptr()).view_src) }
    }

    /// Bytes from the data of its view source to its own.
    pub fn view_offs(self) -> u64 {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).view_offs }
    }

    /// Its first byte in the terms of its buffer's device, or null.
    pub fn data(self) -> *mut c_void {
        // SAFETY: `from_ptr` was given a valid tensor.
        unsafe { (*self.as_ptr()).data }
    }

    /// Its name up to the NUL: at most 63 bytes, in no promised encoding.
    pub fn name(self) -> &'a [u8] {
        // SAFETY: `from_ptr` was given a tensor that stays valid and unchanged for 'a.
        let name: &'a [u8; abi::MAX_NAME] = unsafe { &(*self.as_ptr()).name };
        let end = name[..abi::MAX_NAME - 1].iter().position(|&byte| byte == 0);
        &name[..end.unwrap_or(abi::MAX_NAME - 1)]
    }

    /// Bytes it spans, see [`extent`].
    ///
    /// # Errors
    ///
    /// [`ExtentError`] for a type this crate does not know, or a shape that has no extent.
    pub fn nbytes(self) -> Result<u64, ExtentError> {
        extent(self.type_number(), self.shape(), self.strides())
    }
}

impl fmt::Debug for TensorRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorRef")
            .field("name", &String::from_utf8_lossy(self.name()))
            .field("type", &self.type_number())
            .field("ne", &self.shape())
            .field("op", &self.op())
            .finish_non_exhaustive()
    }
}

/// A graph that ggml hands to a backend, readable for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct GraphRef<'a> {
    nodes: &'a [*mut abi::Tensor],
    uid: u64,
}

impl<'a> GraphRef<'a> {
    /// The graph at a pointer, none for null.
    ///
    /// # Safety
    ///
    /// The graph was made by a ggml of this layout. For `'a`, it and all tensors it reaches are valid and not changed by another thread.
    pub unsafe fn from_ptr(graph: *const abi::CGraph, layout: &Layout) -> Option<Self> {
        let graph = NonNull::new(graph.cast_mut())?.as_ptr();
        // SAFETY: the caller says that the graph is valid; `uid` is read only where the layout has it.
        let (count, nodes, uid) = unsafe {
            let uid = if layout.graph_has_uid() { (*graph).uid } else { 0 };
            ((*graph).n_nodes, (*graph).nodes, uid)
        };
        let nodes = match usize::try_from(count) {
            // SAFETY: the caller says that the graph is valid, so that `nodes` has `n_nodes` entries.
            Ok(count @ 1..) if !nodes.is_null() => unsafe { std::slice::from_raw_parts(nodes, count) },
            _ => &[],
        };
        Some(Self { nodes, uid })
    }

    /// Number of nodes.
    pub fn len(self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no nodes.
    pub fn is_empty(self) -> bool {
        self.nodes.is_empty()
    }

    /// The nodes in the order of computation.
    pub fn nodes(self) -> impl ExactSizeIterator<Item = TensorRef<'a>> + Clone {
        self.nodes.iter().map(|&node| TensorRef {
            // SAFETY: `from_ptr` was given a valid graph, which has no null node.
            tensor: unsafe { NonNull::new_unchecked(node) },
            lifetime: PhantomData,
        })
    }

    /// Equal and not 0: the same graph as before. 0 says nothing.
    pub fn uid(self) -> u64 {
        self.uid
    }
}
