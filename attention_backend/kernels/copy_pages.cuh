// Blocks of the KV cache (the pages of one number in every layer's arrays) to rows of a buffer, or from them: a block is
// then one piece of memory, which one copy over the bus takes.
//
// Grid: (arrays, blocks). A thread block moves one page, 16 bytes a thread; bytes are bytes, whatever their type.
//
// Compile-time: TO_PAGES (0: pages to rows, 1: rows to pages).

typedef long long int64;

struct PageArray {
  unsigned char* pages;
  int64 stride;  // bytes from page to page
  int64 bytes;   // of a page
  int64 offset;  // of this array's page in a row
};

// The same fields, in the same order, as attention_backend/kernels/copy_pages.py: CopyPagesParams.
struct CopyPagesParams {
  const PageArray* arrays;
  const int* blocks;  // numbers of pages: row i is block blocks[i]
  unsigned char* rows;
  int64 row_bytes;
};

extern "C" __global__ void __launch_bounds__(256) copy_pages(const CopyPagesParams p) {
  const PageArray array = p.arrays[blockIdx.x];
  uint4* page = reinterpret_cast<uint4*>(array.pages + p.blocks[blockIdx.y] * array.stride);
  uint4* row = reinterpret_cast<uint4*>(p.rows + blockIdx.y * p.row_bytes + array.offset);
  const int count = static_cast<int>(array.bytes / 16);
#if TO_PAGES
  const uint4* from = row;
  uint4* to = page;
#else
  const uint4* from = page;
  uint4* to = row;
#endif
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += 256) to[i] = __ldcs(from + i);
}
