import sys, torch
from pathlib import Path
from launch.bench import bench_apply as a, bench_audit as b
from launch.bench.gpu_rank import Report, build_rank
from launch.bench.rows import RowWriter
from launch.bench.workload import Shape
import time
out=Path(sys.argv[1]); ratio=float(sys.argv[2])
torch.manual_seed(0)
with RowWriter(out/"apply-gpu.jsonl","apply") as w, RowWriter(out/"audit-gpu.jsonl","audit") as v:
    r=Report(w); r2=Report(v)
    t=time.time()
    a.run_bf16(r, 8_000_000_000//16384*16384); torch.cuda.empty_cache()
    rate=b.run_floors(r2); torch.cuda.empty_cache()
    print('floors',time.time()-t); t=time.time()
    live=build_rank(Shape().scaled(ratio)); print('built',time.time()-t,flush=True); t=time.time()
    try:
        a.run_rank(live,r)
    except Exception:
        import traceback; traceback.print_exc()
    print('applied',time.time()-t,flush=True); t=time.time()
    b.run_rank(live,r2,rate); print('audited',time.time()-t)
print("\n".join(r.lines+r2.lines))
