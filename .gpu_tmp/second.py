import sys, time, torch, numpy as np
from pathlib import Path
from launch.bench import bench_apply as a, bench_audit as b, bench_mask as c
from launch.bench.gpu_rank import *
from launch.bench.rows import RowWriter
from launch.bench.workload import Shape
from megasync.kernels.scatter import launch_scatter
import megasync.kernels.compact as K
out=Path(sys.argv[1])
torch.manual_seed(0)
class W:
    def add(self,*a,**k): pass
r=Report(W())
# P2 breakdown
arena = torch.empty(c.ARENA_NBYTES, dtype=torch.uint8, device="cuda"); arena.view(torch.int64).random_()
plans, regions, nbytes = c.build_plans(Shape(), arena)
snap=torch.zeros(nbytes,dtype=torch.uint8,device='cuda'); c.fill(snap,regions)
place = torch.randint(0, arena.numel(), (int(arena.numel() * CHANGED),), device="cuda").unique()
value = torch.randint(1, 256, (len(place),), dtype=torch.uint8, device="cuda")
lanes=[torch.zeros((p.num_tensors,4),dtype=torch.int64,device='cuda') for p in plans]
def change(): arena[place]^=value
def comp(span): return [x for p,l in zip(plans,lanes) for x in K.compact_(p,snap,l,span_nbytes=span)]
live=sum(p.nbytes for p in plans)
for span in (1<<28,1<<29,1<<30,2<<30,4<<30,8<<30):
    r.add(f"P2 all, span {span>>20}", sample(lambda: comp(span),reset=change), nbytes_in=2*live, nbytes_out=0)
r.add("P2 nothing changed", sample(lambda: comp(1<<30)), nbytes_in=2*live, nbytes_out=0)
# find only, whole plan as one span, step variants
from megasync.kernels._compact_triton import find_kernel
p=plans[0]; n=len(p.rows); sc=torch.empty(int(p.rows[:,6].sum()),dtype=torch.int16,device='cuda'); pc=torch.empty((5,n),dtype=torch.int32,device='cuda')
change()
for step,warps in ((128,1),(256,1),(512,1),(512,2),(1024,4)):
    def f(step=step,warps=warps):
        find_kernel[(n,)](pc,p.table,snap.data_ptr(),sc,pc[0],pc[1],pc[2],0,0,VB=8,W=1,IDS=False,STEP=step,num_warps=warps)
    r.add(f"find w=1 step {step} x {warps}", sample(f), nbytes_in=2*p.nbytes, nbytes_out=0)
change()
for (span) in (1<<30,):
    comp(span); torch.cuda.synchronize(); change(); torch.cuda.synchronize()
    t=time.perf_counter(); comp(span); t1=time.perf_counter()-t; torch.cuda.synchronize(); t2=time.perf_counter()-t
    print('host', t1*1e3,'total', t2*1e3)
    import cProfile,pstats
    pr=cProfile.Profile(); change(); torch.cuda.synchronize(); pr.enable(); comp(span); pr.disable()
    pstats.Stats(pr).sort_stats('tottime').print_stats(14)
# emit only: profile with torch profiler
from torch.profiler import profile, ProfilerActivity
change(); torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CUDA]) as prof:
    comp(1<<30); torch.cuda.synchronize()
print(prof.key_averages().table(sort_by="cuda_time_total",row_limit=10)[:3500])
del arena,snap,place,value,regions,plans,sc,pc,p; torch.cuda.empty_cache()
# P6 at 40 GB
import math
def bf16(nb,rates):
    from megasync.layout.modes import Digit, Remap
    from megasync.kernels.records import pack_records
    rows=nb//2//8192; cols=8192
    live=torch.empty(rows*cols,dtype=torch.int16,device='cuda').view(torch.int64); live.random_()
    whole=(rows,cols)
    rec=Remap(whole,(0,0),whole,(0,0),whole,((0,),(1,)),(Digit(0,0,1,cols),Digit(1,0,1,1)),0,"word",2,"live",True)
    records=pack_records(2,[whole],[[rec]],{"live":live})
    grid=a.make_grid(whole,2); st,ex=grid.boxes(np.arange(grid.num_tiles)); tiles=Tiles(np.zeros(len(st),dtype=np.int64),st,ex)
    for rate in rates:
        planes=random_planes(segments_of(tiles.words)[2],2,rate,one_byte=False)
        plan=plan_scatter(tiles,planes.counts.cpu().numpy(),records)
        fl=a.scatter_floor([a.floor_addresses(plan,planes)],r,f"P6 floor {rate}")
        r.lines[-1]+=f" {fl*1e12/nb:.3f}"
        for blk,wp,at,mr in ((256,2,True,None),(512,4,True,None),(1024,8,True,None),(1024,4,True,None),(512,4,True,40),(256,2,False,None),(512,4,False,None),(1024,4,False,None),(1024,8,False,None),(512,4,False,40)):
            la=plan.launches[0]
            def f():
                launch_scatter(la,plan,planes,None,None,write=True,sums=0,block=blk,num_warps=wp,atomic=at,maxnreg=mr)
            try:
                t=r.add(f"P6 {rate} {nb/1e9:.0f}GB block {blk}x{wp} atomic {at} maxnreg {mr}",sample(f,num=5),nbytes_in=0,nbytes_out=nb)
                r.lines[-1]+=f" {t*1e12/nb:.3f} ms/GB {t/fl:.3f}"
            except Exception as e: print('fail',repr(e)[:200])
bf16(32_768_000_000//16384*16384,(0.001,0.01,0.02,0.05)); torch.cuda.empty_cache()
print("\n".join(r.lines))
# dense XOR variants and P1 variants at quarter scale
live=build_rank(Shape().scaled(0.25))
s=live.sizes[1]; fl=a.scatter_floor([a.floor_addresses(s.plan,s.planes)],r,"P1/4 floor")
for blk,wp,at,sm in ((64,1,True,0),(128,1,True,0),(128,2,True,0),(128,4,True,0),(256,4,True,0),(128,2,False,0),(128,1,False,0),(64,1,True,2),(64,2,True,2),(64,1,False,2),(128,2,False,2)):
    x=new_l=torch.zeros((s.records.num_tensors,4),dtype=torch.int64,device='cuda')
    def f():
        for la in s.plan.launches: launch_scatter(la,s.plan,s.planes,x if sm else None,None,write=True,sums=sm,block=blk,num_warps=wp,atomic=at)
    t=r.add(f"P1/4 {blk}x{wp} atomic {at} sums {sm}",sample(f),nbytes_in=0,nbytes_out=0); r.lines[-1]+=f" {t/fl:.3f}"
b.SHAPES=((0,0),(64,1),(128,1),(128,2),(256,4))
from megasync.kernels.walk_plan import plan_dense
layer=max(q.spec.layer for q in s.placed); mine=np.nonzero(np.array([s.placed[t].spec.layer==layer for t in s.tiles.tensors]))[0]
tl=Tiles(s.tiles.tensors[mine],s.tiles.starts[mine],s.tiles.extents[mine]); off=np.cumsum(tl.words)-tl.words
plan=plan_dense(tl,off,s.records); num=int(tl.words.sum()); print([(k.piece_nbytes,k.num_digits,k.num_checks,len(k.items)) for k in plan.fast],len(plan.slow))
from megasync.kernels.walk import launch_walk
mask=torch.zeros(-(-num//8)*8,dtype=torch.uint8,device='cuda'); i=torch.randint(0,num,(int(num*CHANGED),),device='cuda'); mask[i]=torch.randint(1,256,(len(i),),dtype=torch.uint8,device='cuda')
ch=torch.zeros((s.records.num_tensors,4),dtype=torch.int64,device='cuda')
for sm in (0,4):
    for blk,wp in ((32,1),(64,1),(128,1),(128,2),(256,4)):
        t=r.add(f"dense XOR {blk}x{wp} sums {sm}",sample(lambda: launch_walk(plan,mask,ch if sm else None,sums=sm,block=blk,num_warps=wp),num=7),nbytes_in=num,nbytes_out=0); r.lines[-1]+=f" {t*1e12/num:.3f} ms/GB"
print("\n".join(r.lines))
