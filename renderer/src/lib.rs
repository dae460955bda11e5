//! What virglrenderer does for APIR: contexts, blobs and worker processes, behind a unix socket.
